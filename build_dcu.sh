#!/usr/bin/env bash
# Report the HIP toolchain, and build from csrc_hip what there is to build.
#
#   build_dcu.sh [--target host|gfx950|gfx938|cuda|all]      default: all, each target whose compiler is here
#
# Today that is the layout header alone: csrc_hip/checks/layout.cpp proves its maps while it compiles.  There are no
# kernels and no extension yet, so nothing is installed.  Exit status 1 with the reason when the target's compiler is
# missing (for `all`: when every one is) or a check fails.
#
#   host     a C++17 compiler                                          gfx950   clang-22 and lld-22, no ROCm needed
#   gfx938   hipcc of Hygon's DTK, found through DTK_HOME or PATH      cuda     nvcc
set -euo pipefail
source "$(dirname "$0")/tools/toolchain.sh"
cd "$root"

target=all
while [ $# -gt 0 ]; do
    case $1 in
        --target) target=${2:-}; shift; [ $# -gt 0 ] && shift ;;
        -h | --help) sed -n '2,/^set -e/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        *) target=bad; break ;;
    esac
done
case $target in
    host | gfx950 | gfx938 | cuda | all) ;;
    *) echo "usage: build_dcu.sh [--target host|gfx950|gfx938|cuda|all]" >&2; exit 2 ;;
esac

cxx=$(first "${CXX:-c++}" g++ clang++ || true)
clang=$(first clang-22 || true)
lld=$(first ld.lld-22 || true)
hipcc=$(first "${DTK_HOME:+$DTK_HOME/bin/hipcc}" hipcc || true)
nvcc=$(first "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" nvcc || true)

report_common
say clang-22 "$(version_line "${clang:-clang-22}" --version)"
say lld-22 "${lld:-not found}"
say hipcc "$(version_line "${hipcc:-hipcc}" --version)"
say nvcc "$([ -n "$nvcc" ] && "$nvcc" --version | sed -n 's/.*release/release/p' || echo 'not found')"
say kernels "csrc_hip/kernels and csrc_hip/host hold none yet: nothing to install"

check=csrc_hip/checks/layout.cpp
flags=(-std=c++17 -I csrc_hip/include)
built=0 failed=0

# attempt TARGET MISSING COMMAND...: run the compiler; MISSING, when not empty, says why that cannot be.
attempt() {
    local name=$1 missing=$2 log=build/hip/$1.log
    shift 2
    if [ -n "$missing" ]; then
        say "$name" "cannot build: $missing"
        return
    fi
    mkdir -p build/hip
    if "$@" >"$log" 2>&1; then
        say "$name" "$check: ok"
        built=1
    else
        say "$name" "$check: FAILED: $*"
        cat "$log"
        failed=1
    fi
}

build() {
    case $1 in
        host)
            attempt host "$([ -n "$cxx" ] || echo 'no C++ compiler (c++, g++ or clang++) in PATH')" \
                "$cxx" "${flags[@]}" -Wall -Wextra -Werror "$check" -o build/hip/layout
            ;;
        gfx950)
            attempt gfx950 "$([ -n "$clang" ] && [ -n "$lld" ] || echo 'clang-22 or lld-22 is not in PATH')" \
                "$clang" -x hip --cuda-device-only --no-gpu-bundle-output --offload-arch=gfx950 -nogpulib -nogpuinc \
                "${flags[@]}" -O3 "$check" -o build/hip/layout_gfx950.co
            ;;
        gfx938)
            attempt gfx938 "$([ -n "$hipcc" ] || echo "no hipcc: set DTK_HOME to the root of Hygon's DTK")" \
                "$hipcc" --offload-arch=gfx938 "${flags[@]}" -O3 -c "$check" -o build/hip/layout_gfx938.o
            ;;
        cuda)
            attempt cuda "$([ -n "$nvcc" ] || echo 'no nvcc in CUDA_HOME or PATH')" \
                "$nvcc" -x cu -arch=sm_90a -cubin "${flags[@]}" "$check" -o build/hip/layout_cuda.cubin
            ;;
    esac
}

if [ "$target" = all ]; then
    for each in host gfx950 gfx938 cuda; do build "$each"; done
else
    build "$target"
fi
[ "$failed" = 0 ] && [ "$built" = 1 ] && exit 0
[ "$built" = 1 ] || echo "build_dcu.sh: nothing could be built for target $target; the lines above say why" >&2
exit 1
