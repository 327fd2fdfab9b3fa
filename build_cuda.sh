#!/usr/bin/env bash
# Report the CUDA toolchain, and build from csrc_cuda what there is to build.
#
# Today that is the device headers alone: each must compile by itself for Hopper (sm_90a) and Blackwell (sm_100a),
# with nvcc where it is installed, else with NVRTC.  There are no kernels and no native launcher yet, so nothing is
# installed.  Exit status 1 with the reason when neither compiler is found or a header does not compile.
#
#   PYTHON=...       interpreter to report and to look for NVRTC in (default .venv/bin/python, else python3)
#   CUDA_HOME=...    toolkit whose nvcc is taken before the one in PATH
set -euo pipefail
source "$(dirname "$0")/tools/toolchain.sh"
cd "$root"

archs=(sm_90a sm_100a)
nvcc=$(first "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" nvcc || true)
nvrtc=$("$PYTHON" tools/nvrtc_check.py 2>/dev/null) || nvrtc="not found"

report_common
say nvcc "$([ -n "$nvcc" ] && "$nvcc" --version | sed -n 's/.*release/release/p' || echo 'not found')"
say NVRTC "$nvrtc"
say pybind11 "$(module pybind11 pybind11.__version__)"
say fmt "$(pkg-config --modversion fmt 2>/dev/null || echo 'not found')"
say launcher "csrc_cuda/host holds none yet: nothing native to link"

mapfile -t headers < <(cd csrc_cuda/include && find dg -name '*.cuh' -o -name '*.h' -o -name '*.hpp' | sort)
failed=0

# with_nvcc ARCH: each header alone, then the table of checks, as cubins in build/cuda.
with_nvcc() {
    local arch=$1 header out
    if ! "$nvcc" --list-gpu-code | grep -qx "${arch%a}"; then
        say "$arch" "skipped: this nvcc does not know it"
        return
    fi
    for header in "${headers[@]}" checks; do
        out=build/cuda/$arch/${header//\//_}
        mkdir -p "$(dirname "$out")"
        if [ "$header" = checks ]; then
            cp csrc_cuda/checks/common.cu "$out.cu"
        else
            printf '#include <%s>\n' "$header" >"$out.cu"
        fi
        if "$nvcc" -std=c++20 "-arch=$arch" -cubin -I csrc_cuda/include "$out.cu" -o "$out.cubin" 2>"$out.log"; then
            say "$arch" "$header: ok"
        else
            say "$arch" "$header: FAILED"
            cat "$out.log"
            failed=1
        fi
    done
}

if [ -n "$nvcc" ]; then
    for arch in "${archs[@]}"; do with_nvcc "$arch"; done
elif [ "$nvrtc" != "not found" ]; then
    for arch in "${archs[@]}"; do "$PYTHON" tools/nvrtc_check.py "$arch" "${headers[@]}" || failed=1; done
else
    echo "build_cuda.sh: neither nvcc nor NVRTC is here, so no device code can be compiled." >&2
    echo "Install a CUDA toolkit, or NVRTC alone: pip install 'nvidia-cuda-nvrtc==13.0.*'" >&2
    exit 1
fi
exit "$failed"
