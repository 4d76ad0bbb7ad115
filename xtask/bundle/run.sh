#!/usr/bin/env bash
# run.sh MODE [N] [--only PART] [--skip PART] [--for SECONDS]: smoke, conformance, faults, drill,
# bench or all, on the first N GPUs (all of them without N); or evidence: all but smoke, over many
# calls (--done FILE; see --help). Needs a driver, bash, python3, and gcc for what watches the
# driver's calls (or --no-interposer); conformance on two GPUs and more wants compute-sanitizer, or
# --skip check-. Each configuration is a line of JSON in $OUT/results.jsonl (./results.jsonl without
# OUT).
set -u
# NVLink multicast stays off.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 NCCL_GRAPH_REGISTER=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUBLASMP_DISABLE_MULTICAST=1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Programs stand beside this file, and look for kernels in the folder beside them; packed both are a
# third of it.
unpack='import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")'
for folder in cubins programs; do
    [ -e "$here/$folder.tar.xz" ] && [ ! -e "$here/.$folder" ] || continue
    new=$(mktemp -d "$here/new.XXXXXX") || exit
    python3 -c "$unpack" "$here/$folder.tar.xz" "$new" || exit
    if [ "$folder" = cubins ]; then
        mv "$new/cubins" "$here/cubins" || exit
    else
        mv "$new/programs/"* "$here" && rmdir "$new/programs" || exit
    fi
    rmdir "$new" && touch "$here/.$folder" || exit
done
exec python3 "$here/run.py" "$@"
