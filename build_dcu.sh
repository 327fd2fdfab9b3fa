#!/usr/bin/env bash
# Report the HIP toolchain, build the kernels of csrc_hip, and pack what is built into a wheel.
#
#   build_dcu.sh [--target host|gfx950|gfx938|cuda|all] [--out FOLDER]
#
# The default is `all`: each target whose compiler is here. Kernels go to backends/hip/lib/<target>, with a manifest of
# what each one takes; a wheel with all that lies there goes to build/whl. With --out they go to FOLDER/<target>, for
# DG_HIP_LIB_DIR, and no wheel is made.
#
#   host     a C++17 compiler                                          gfx950   clang-22 and lld-22, no ROCm needed
#   gfx938   hipcc of Hygon's DTK, found through DTK_HOME or PATH      cuda     nvcc
#
# Exit status 1 with the reason when the target's compiler is missing (for `all`: when every one is), when something
# does not compile or load, or when a kernel takes more registers or local memory than its architecture has.
set -euo pipefail
source "$(dirname "$0")/tools/toolchain.sh"
cd "$root"

# Through the link, since an sdist has no other backends/.
target=all out=dg_core/backends/hip/lib own_out=0
while [ $# -gt 0 ]; do
    case $1 in
        --target) target=${2:-}; shift; [ $# -gt 0 ] && shift ;;
        --out) out=${2:-} own_out=1; shift; [ $# -gt 0 ] && shift ;;
        -h | --help) sed -n '2,/^set -e/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        *) target=bad; break ;;
    esac
done
case $target in
    host | gfx950 | gfx938 | cuda | all) ;;
    *) target='' ;;
esac
if [ -z "$target" ] || [ -z "$out" ]; then
    echo "usage: build_dcu.sh [--target host|gfx950|gfx938|cuda|all] [--out FOLDER]" >&2
    exit 2
fi

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
say sources "$(find csrc_hip/kernels -name '*.hip' 2>/dev/null | grep -c . || true) kernel files in csrc_hip/kernels"

check=csrc_hip/checks/layout.cpp
flags=(-std=c++17 -I csrc_hip/include)
built=0 failed=0
mkdir -p build/hip

# attempt TARGET WHAT COMMAND...: run it and say so, with the words that it ends with; when it fails, all of them.
attempt() {
    local name=$1 what=$2 log=build/hip/$1.log
    shift 2
    if "$@" >"$log" 2>&1; then
        say "$name" "$what: ok$(sed -n '$s/^\([^ ]\)/, \1/p' "$log")"
    else
        say "$name" "$what: FAILED: $*"
        cat "$log"
        failed=1
        return 1
    fi
}

# build TARGET COMPILER MISSING CHECK...: the check of the layout, then the kernels. MISSING, when not empty, says why
# that cannot be.
build() {
    local name=$1 compiler=$2 missing=$3
    shift 3
    if [ -n "$missing" ]; then
        say "$name" "cannot build: $missing"
        return
    fi
    attempt "$name" "$check" "$compiler" "$@" "${flags[@]}" "$check" || return 0
    attempt "$name" kernels "$PYTHON" tools/hip_build.py "$name" --compiler "$compiler" --out "$out" || return 0
    built=1
}

build_target() {
    case $1 in
        host)
            build host "$cxx" "$([ -n "$cxx" ] || echo 'no C++ compiler (c++, g++ or clang++) in PATH')" \
                -Wall -Wextra -Werror -o build/hip/layout
            ;;
        gfx950)
            build gfx950 "$clang" "$([ -n "$clang" ] && [ -n "$lld" ] || echo 'clang-22 or lld-22 is not in PATH')" \
                -x hip --cuda-device-only --no-gpu-bundle-output --offload-arch=gfx950 -nogpulib -nogpuinc -O3 \
                -o build/hip/layout_gfx950.co
            ;;
        gfx938)
            build gfx938 "$hipcc" "$(dtk_is_missing)" --offload-arch=gfx938 -O3 -c -o build/hip/layout_gfx938.o
            ;;
        cuda)
            build cuda "$nvcc" "$([ -n "$nvcc" ] || echo 'no nvcc in CUDA_HOME or PATH')" \
                -x cu -arch=sm_90a -cubin -o build/hip/layout_cuda.cubin
            ;;
    esac
}

# ROCm has a hipcc too, which knows no gfx938.
dtk_is_missing() {
    if [ -z "$hipcc" ]; then
        echo "no hipcc: set DTK_HOME to the root of Hygon's DTK"
    elif ! "$hipcc" -x hip --offload-arch=gfx938 --cuda-device-only -nogpulib -nogpuinc -E /dev/null >/dev/null 2>&1; then
        echo "$hipcc does not know gfx938: set DTK_HOME to the root of Hygon's DTK"
    fi
}

pack() {
    local version
    version=$(module setuptools setuptools.__version__)
    if ! [ "${version%%.*}" -ge 77 ] 2>/dev/null; then
        say wheel "left out: $PYTHON has no setuptools from 77 on ($version)"
        return
    fi
    rm -rf build/hip/wheel
    DG_PACKAGE_HIP=1 DG_SKIP_CUDA_BUILD=1 attempt wheel setup.py "$PYTHON" setup.py -q build \
        --build-base build/hip/wheel bdist_wheel --bdist-dir build/hip/wheel/dist --dist-dir build/hip/wheel/whl ||
        return 0
    rm -f build/whl/dg_core-*.whl
    mkdir -p build/whl
    mv build/hip/wheel/whl/*.whl build/whl
    say wheel "$(find build/whl -name 'dg_core-*.whl')"
}

if [ "$target" = all ]; then
    for each in host gfx950 gfx938 cuda; do build_target "$each"; done
else
    build_target "$target"
fi
if [ "$built" = 1 ] && [ "$failed" = 0 ] && [ "$own_out" = 0 ]; then
    pack
fi
[ "$failed" = 0 ] && [ "$built" = 1 ] && exit 0
[ "$built" = 1 ] || echo "build_dcu.sh: nothing could be built for target $target; the lines above say why" >&2
exit 1
