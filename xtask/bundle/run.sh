#!/usr/bin/env bash
# run.sh MODE [N] [--only PART] [--skip PART] [--for SECONDS]: smoke, conformance, faults, drill,
# bench or all, on the first N GPUs (all of them without N); or evidence: all but smoke, over many
# calls (--done FILE; see --help). Needs a driver, bash, python3, and gcc for what watches the
# driver's calls (or --no-interposer); conformance on two GPUs and more wants compute-sanitizer, or
# --skip check-. Each configuration is a line of JSON in $OUT/results.jsonl (./results.jsonl without
# OUT).
set -u
# NVLink multicast stays off.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUBLASMP_DISABLE_MULTICAST=1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Programs look for kernels in the folder beside them; packed they are a tenth of it.
if [ -e "$here/cubins.tar.xz" ] && [ ! -d "$here/cubins" ]; then
    unpack='import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")'
    new=$(mktemp -d "$here/new.XXXXXX") && python3 -c "$unpack" "$here/cubins.tar.xz" "$new" || exit
    mv "$new/cubins" "$here/cubins" || exit
    rmdir "$new"
fi
exec python3 "$here/run.py" "$@"
