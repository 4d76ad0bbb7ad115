"""What holds of the package as it is installed, whatever its operations do."""

import ast
import inspect
import pathlib
import subprocess
import sys

import tilewire

ROOT = pathlib.Path(tilewire.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


def trees():
    assert SOURCES
    for path in SOURCES:
        yield path, ast.parse(path.read_text())


def test_no_name_is_defined_twice():
    for path, tree in trees():
        for scope in ast.walk(tree):
            if not isinstance(scope, (ast.Module, ast.ClassDef)):
                continue
            kinds = (ast.FunctionDef, ast.ClassDef)
            names = [n.name for n in scope.body if isinstance(n, kinds)]
            assert len(names) == len(set(names)), (path, names)


def test_no_error_is_swallowed():
    """Whoever catches everything must do something with it."""
    for path, tree in trees():
        for handler in ast.walk(tree):
            if not isinstance(handler, ast.ExceptHandler):
                continue
            broad = handler.type is None or getattr(handler.type, "id", "") in (
                "Exception",
                "BaseException",
            )
            empty = all(isinstance(n, ast.Pass) for n in handler.body)
            assert not (broad and empty), (path, handler.lineno)
            assert handler.type is not None, (path, handler.lineno)


def test_no_precondition_is_an_assertion():
    for path, tree in trees():
        asserts = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)]
        assert not asserts, (path, asserts)


def test_tensors_are_positional_and_the_rest_by_keyword():
    import tilewire.torch as tw

    for name in tw.__all__:
        f = getattr(tw, name)
        if not inspect.isfunction(f):
            continue
        kinds = inspect.Parameter
        positional = [
            p.name
            for p in inspect.signature(f).parameters.values()
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        data = {"x", "w", "q", "k", "v", "y", "t", "rows", "topk_idx", "topk_weights", "weights"}
        # What they belong to, and what is done with them.
        other = {"group", "splits", "m_splits", "buf", "row_map", "op", "recipe"}
        assert set(positional) <= data | other, (name, positional)
        for word in ("rank", "size", "world_size"):
            assert word not in positional, name


def test_no_collective_of_the_framework_is_called():
    """A store is all that is used of torch.distributed."""
    banned = {"all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter", "send", "recv"}
    for path, tree in trees():
        for call in ast.walk(tree):
            if isinstance(call, ast.Attribute) and call.attr in banned:
                owner = ast.unparse(call.value)
                assert "dist" not in owner and "c10d" not in owner, (path, call.lineno, owner)


def test_nothing_of_cuda_or_torch_is_linked():
    (native,) = ROOT.glob("_native*.so")
    data = native.read_bytes()
    for line in subprocess.run(["ldd", native], capture_output=True, text=True).stdout.splitlines():
        name = line.split()[0]
        others = ("cuda", "torch", "c10", "nccl", "cublas", "python")
        assert not any(w in name for w in others), name
    assert b"libcuda.so.1" in data  # opened at run time


def test_without_frameworks_it_imports_and_the_doctor_speaks():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None;"
        " import tilewire; print(tilewire.backends())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0 and "('host', None)" in out.stdout, out.stderr
    out = subprocess.run(
        [sys.executable, "-m", "tilewire", "doctor"], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0 and "backend host: ready" in out.stdout, out.stdout + out.stderr
    opened = subprocess.run(
        [sys.executable, "-c", "import tilewire; print(open('/proc/self/maps').read())"],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "_native" in opened and "libcuda" not in opened and "libtorch" not in opened
