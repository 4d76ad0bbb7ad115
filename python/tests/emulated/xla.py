"""What XLA is to a handler, by ctypes: the call frame and the table of its functions, API 0.3."""

import ctypes
import json
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t
from ctypes import c_uint64, c_void_p

from tilewire import _native

INSTANTIATE, INITIALIZE, EXECUTE = 0, 2, 3
BUFFER, STRING = 1, 4
# XLA's numbers of element types, and ours.
TYPES = {"f32": (11, 4), "i32": (4, 4), "u8": (6, 1), "f8e4m3": (20, 1)}


def struct(name, *fields):
    head = [("struct_size", c_size_t), ("extension", c_void_p)]
    return type(name, (Structure,), {"_fields_": head + list(fields)})


Version = struct("Version", ("major", c_int), ("minor", c_int))
ErrorCreate = struct("ErrorCreate", ("message", c_char_p), ("code", c_int))
Get = struct("Get", ("ctx", c_size_t), ("out", c_void_p))
GetOrdinal = struct("GetOrdinal", ("ctx", c_size_t), ("out", c_int32))
State = struct(
    "State", ("ctx", c_size_t), ("stage", c_int), ("type_id", c_void_p), ("state", c_void_p)
)
Buffer = struct(
    "Buffer", ("dtype", c_int), ("data", c_uint64), ("rank", c_int64), ("dims", POINTER(c_int64))
)
Buffers = struct("Buffers", ("size", c_int64), ("types", c_void_p), ("items", c_void_p))
Attrs = struct(
    "Attrs", ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("items", c_void_p)
)
Frame = struct(
    "Frame",
    ("api", c_void_p),
    ("ctx", c_size_t),
    ("stage", c_int),
    ("args", Buffers),
    ("rets", Buffers),
    ("attrs", Attrs),
    ("future", c_void_p),
)


class Span(Structure):
    _fields_ = [("ptr", c_char_p), ("len", c_size_t)]


FUNCTIONS = (
    "error_create error_get_message error_destroy handler_register stream_get type_register"
    " context_get state_set state_get memory_allocate memory_free pool_schedule pool_num_threads"
    " future_create future_set_available future_set_error run_id_get device_ordinal_get"
).split()
Api = struct(
    "Api", ("version", Version), ("internal", c_void_p), *((n, c_void_p) for n in FUNCTIONS)
)
HANDLER = ctypes.CFUNCTYPE(c_size_t, POINTER(Frame))


class Xla:
    """Programs of one call each, on the devices of this process."""

    def __init__(self, streams):
        self.streams = streams
        self.errors, self.states, self.calls = [], {}, 0
        handlers, type_id, _ = _native.jax_handlers(True)
        self.handlers = {n: HANDLER(address) for n, address in handlers}
        # As XLA numbers a type that is registered.
        ctypes.cast(type_id, POINTER(c_int64))[0] = 77
        self.table = Api(struct_size=ctypes.sizeof(Api))
        self.table.version = Version(ctypes.sizeof(Version), None, 0, 3)
        self.kept = [
            self.give("error_create", ErrorCreate, self.error_create),
            self.give("stream_get", Get, self.stream_get),
            self.give("state_set", State, self.state_set),
            self.give("state_get", State, self.state_get),
            self.give("device_ordinal_get", GetOrdinal, self.ordinal_get),
        ]

    def give(self, name, kind, f):
        function = ctypes.CFUNCTYPE(c_size_t, POINTER(kind))(lambda args: f(args.contents) or 0)
        setattr(self.table, name, ctypes.cast(function, c_void_p))
        return function

    def error_create(self, args):
        self.errors.append(args.message.decode())
        return len(self.errors)

    # A context is the number of a call, and of a device from one on.
    def stream_get(self, args):
        args.out = self.streams[args.ctx % 16 - 1]

    def ordinal_get(self, args):
        args.out = args.ctx % 16 - 1

    def state_set(self, args):
        self.states[args.ctx // 16] = args.state

    def state_get(self, args):
        args.state = self.states[args.ctx // 16]

    def enter(self, stage, name, ctx, args=(), rets=(), text=None):
        """Calls a handler; raises the text of its error."""
        kept = []

        def array(kind, values):
            kept.append((kind * max(1, len(values)))(*values))
            return ctypes.addressof(kept[-1])

        def buffers(tensors):
            items = []
            for t in tensors:
                dims = (c_int64 * max(1, len(t.dims)))(*t.dims)
                size = ctypes.sizeof(Buffer)
                b = Buffer(size, None, TYPES[t.dtype][0], t.address, len(t.dims), dims)
                kept.append(b)
                items.append(ctypes.addressof(b))
            types = array(c_int, [BUFFER] * len(items))
            return Buffers(ctypes.sizeof(Buffers), None, len(items), types, array(c_void_p, items))

        attrs = Attrs(ctypes.sizeof(Attrs), None, 0, None, None, None)
        if text is not None:
            spans = [Span(b"spec", 4), Span(text.encode(), len(text.encode()))]
            kept.append(spans)
            name_at, text_at = map(ctypes.addressof, spans)
            parts = array(c_int, [STRING]), array(c_void_p, [name_at]), array(c_void_p, [text_at])
            attrs = Attrs(ctypes.sizeof(Attrs), None, 1, *parts)
        frame = Frame(ctypes.sizeof(Frame), None, ctypes.addressof(self.table), ctx, stage)
        frame.args, frame.rets, frame.attrs = buffers(args), buffers(rets), attrs
        code = self.handlers[name](byref(frame))
        if code:
            raise RuntimeError(self.errors[code - 1])

    def compiled(self, op, args, rets, **more):
        """A program whose one call is ``op``; operands and results by name: (dtype, shape)."""
        self.calls += 1
        spec = dict(op=op, world=1, site=self.calls, **{"axes": ["x"], **more})
        for key, named in (("args", args), ("rets", rets)):
            parts = [{"name": n, "dtype": d, "shape": list(s)} for n, (d, s) in named.items()]
            spec[key] = parts
        call = self.calls
        self.enter(INSTANTIATE, "instantiate", call * 16, text=json.dumps(spec))
        for device in range(len(self.streams)):
            # On each device before its first execution: what has no team is made then.
            self.enter(INITIALIZE, "initialize", call * 16 + device + 1)

        def run(device, *tensors):
            ctx, num = call * 16 + device + 1, len(args)
            self.enter(EXECUTE, "execute", ctx, tensors[:num], tensors[num:])

        return run
