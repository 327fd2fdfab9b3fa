#!/usr/bin/env bash
# Report the CUDA toolchain, and build from csrc_cuda what there is to build ahead of time.
#
# The native launcher, csrc_cuda/host, becomes a module of this PYTHON in backends/cuda; neither CUDA nor torch is
# needed for it.  The device headers must each compile by themselves for Hopper (sm_90a) and Blackwell (sm_100a),
# with nvcc where it is installed, else with NVRTC; kernels are compiled at run time.  Exit status 1 with the
# reason when the module does not build or does not import, a header does not compile, or neither compiler of
# device code is found.
#
#   PYTHON=...       interpreter to build for and to look for NVRTC in (default .venv/bin/python, else python3)
#   CXX=...          C++ compiler of the module
#   FMT_INCLUDE=...  folder with fmt's headers
#   CUDA_HOME=...    toolkit whose nvcc is taken before the one in PATH
#   DG_SKIP_CUDA_BUILD=1  leaves the module out
set -euo pipefail
source "$(dirname "$0")/tools/toolchain.sh"
cd "$root"

archs=(sm_90a sm_100a)
nvcc=$(first "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" nvcc || true)
nvrtc=$("$PYTHON" tools/nvrtc_check.py 2>/dev/null) || nvrtc="not found"
failed=0

# fmt_found: which formatter csrc_cuda/host/format.h will take, by its own rule.
fmt_found() {
    local cxx macros
    cxx=$(first "${CXX:-c++}" g++ clang++) || { echo "unknown: no C++ compiler"; return; }
    macros=$(echo '#include "csrc_cuda/host/format.h"' |
        "$cxx" -std=c++20 ${FMT_INCLUDE:+-I"$FMT_INCLUDE"} -I . -x c++ -dM -E - 2>&1) || true
    case $(sed -n 's/^#define DG_FORMATTER //p' <<<"$macros") in
    1) echo "headers of version $(sed -n 's/^#define FMT_VERSION //p' <<<"$macros")" ;;
    2) echo "not found; std::format in its place" ;;
    3) echo "not found, nor std::format; the lines of csrc_cuda/host/format.h in its place" ;;
    *) echo "unknown: $(grep -m1 error <<<"$macros" || echo "$cxx did not say")" ;;
    esac
}

# Prints the path of the module for PYTHON, once it imports, and what it was built with.
import_check='
import importlib.util, sysconfig
path = "backends/cuda/_C" + sysconfig.get_config_var("EXT_SUFFIX")
spec = importlib.util.spec_from_file_location("_C", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(f"{path}: built with pybind11 {module.PYBIND11} and {module.FORMATTER}, imports")'

# launcher: build the module in place and import it.
launcher() {
    local log=build/cuda/host.log
    mkdir -p build/cuda
    if ! DG_FORCE_BUILD=1 "$PYTHON" setup.py build_ext --inplace --build-temp build/cuda/host \
        --build-lib build/cuda/lib >"$log" 2>&1; then
        say launcher "FAILED to build ($log)"
        cat "$log" >&2
        return 1
    fi
    if ! "$PYTHON" -c "$import_check" >"$log" 2>&1; then
        say launcher "FAILED to import"
        cat "$log" >&2
        return 1
    fi
    say launcher "$(cat "$log")"
}

report_common
say nvcc "$([ -n "$nvcc" ] && "$nvcc" --version | sed -n 's/.*release/release/p' || echo 'not found')"
say NVRTC "$nvrtc"
say pybind11 "$(module pybind11 pybind11.__version__)"
say setuptools "$(module setuptools setuptools.__version__) (the launcher needs 77 or newer)"
say fmt "$(fmt_found)"
if [ "${DG_SKIP_CUDA_BUILD:-0}" = 1 ]; then
    say launcher "left out: DG_SKIP_CUDA_BUILD=1"
else
    launcher || failed=1
fi

mapfile -t headers < <(cd csrc_cuda/include && find dg -name '*.cuh' -o -name '*.h' -o -name '*.hpp' | sort)

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
