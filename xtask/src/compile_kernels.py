"""Compiles every kernel with NVRTC for each architecture, without a GPU.

Usage: compile_kernels.py SITE < sources.jsonl. SITE holds the wheel nvidia-cuda-nvrtc.
Fails on any compile error, register spill or serialised-wgmma warning.
"""

import ctypes
import glob
import json
import re
import sys

ARCHS = ["sm_80", "sm_90a", "sm_100a"]


def load(site):
    # NVRTC opens its builtins by bare name: they must be in the process first.
    for name in ["libnvrtc-builtins.so*", "libnvrtc.so.1?"]:
        path = sorted(p for p in glob.glob(f"{site}/nvidia/**/{name}", recursive=True) if "alt" not in p)
        lib = ctypes.CDLL(path[0], mode=ctypes.RTLD_GLOBAL)
    return lib


def compile_one(rtc, unit, arch):
    prog = ctypes.c_void_p()
    src, name = unit["text"].encode(), unit["name"].encode()
    assert rtc.nvrtcCreateProgram(ctypes.byref(prog), src, name, 0, None, None) == 0
    # Offsets are multiples of 4096; their values do not matter here.
    opts = [f"-D{d}=4096" for d in unit["defines"]]
    opts += [f"--gpu-architecture={arch}", "-std=c++17", "--ptxas-options=-v"]
    argv = (ctypes.c_char_p * len(opts))(*[o.encode() for o in opts])
    code = rtc.nvrtcCompileProgram(prog, len(opts), argv)
    size = ctypes.c_size_t()
    rtc.nvrtcGetProgramLogSize(prog, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    rtc.nvrtcGetProgramLog(prog, log)
    cubin = ctypes.c_size_t()
    rtc.nvrtcGetCUBINSize(prog, ctypes.byref(cubin))
    return code, log.value.decode(), cubin.value


def main():
    rtc, bad = load(sys.argv[1]), 0
    for unit in map(json.loads, sys.stdin):
        for arch in ARCHS:
            code, log, size = compile_one(rtc, unit, arch)
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
            wgmma = re.search(r"C75\d\d", log)
            good = code == 0 and size > 0 and not any(spills) and not wgmma
            seen = all(k in log for k in unit["kernels"]) if "Compiling entry" in log else True
            print(f"{unit['name']} {arch}: {'ok' if good and seen else 'FAILED'}, {size} bytes, spills {spills}")
            if not (good and seen):
                print(log)
                bad += 1
    sys.exit(1 if bad else 0)


main()
