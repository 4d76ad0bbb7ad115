"""Checkpoints of `tilewire train` are files of safetensors, which its own package reads."""

import json
import os
import subprocess

import safetensors
import safetensors.torch
import torch

SIZES = "--seq 16 --batch 2 --d-model 32 --head-dim 16 --d-ff 32"


def test_the_package_of_safetensors_reads_checkpoints(tmp_path):
    program = os.environ["TW_PROGRAM"]
    assert os.path.exists(program), f"{program} is not there: cargo build --release"
    words = f"train --task copy {SIZES} --ranks 2 --tp 2 --steps 1 --checkpoint c".split()
    done = subprocess.run([program, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "c" / "step-0000000001"
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    paths = [folder / f["name"] for f in manifest["files"]]
    read = [safetensors.torch.load_file(p) for p in paths]
    raw = [p.read_bytes() for p in paths]
    parts = 0
    for entry in manifest["tensors"]:
        rows, cols = entry["shape"]
        whole = torch.full((rows, cols), torch.nan)
        for part in entry["parts"]:
            tensor = read[part["file"]].pop(entry["name"])
            assert tensor.dtype == torch.float32
            data = tensor.contiguous().numpy().tobytes()
            at = part["offset"]
            assert data == raw[part["file"]][at : at + len(data)], entry["name"]
            left = tensor.flatten()
            for r0, r1, c0, c1 in part["pieces"]:
                n = (r1 - r0) * (c1 - c0)
                whole[r0:r1, c0:c1] = left[:n].view(r1 - r0, c1 - c0)
                left = left[n:]
            assert left.numel() == 0
            parts += 1
        # Every element is in one part; second moments are sums of squares.
        assert whole.isfinite().all(), entry["name"]
        assert not entry["name"].endswith(".v") or (whole >= 0).all()
    assert parts > len(manifest["tensors"]) and not any(read), "a file has tensors of its own"
    with safetensors.safe_open(paths[0], "pt") as f:
        assert f.metadata() == {"format": "tilewire checkpoint"}
