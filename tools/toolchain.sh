# Sourced by build_cuda.sh and build_dcu.sh: what both say about the machine.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "$root/.venv/bin/python" ] && PYTHON=$root/.venv/bin/python
fi

# say WHAT WORDS: one line of the report.
say() { printf '%-10s %s\n' "$1" "$2"; }

# first COMMAND...: the first of these that is installed, as a path; nothing (and status 1) when none is.
first() {
    local name
    for name in "$@"; do
        command -v "$name" && return
    done
    return 1
}

# version_line COMMAND...: the line of its output that holds a version number.
version_line() {
    if command -v "$1" >/dev/null; then
        "$@" 2>&1 | grep -m1 -E '[0-9]+\.[0-9]+' || echo "prints no version"
    else
        echo "not found"
    fi
}

# module NAME EXPRESSION: what Python says about an installed module.
module() { "$PYTHON" -c "import $1; print($2)" 2>/dev/null || echo "not installed"; }

report_common() {
    say python "$(version_line "$PYTHON" --version) ($PYTHON)"
    say torch "$(module torch 'torch.__version__, "CUDA", torch.version.cuda, "HIP", torch.version.hip')"
    say c++ "$(version_line "$(first "${CXX:-c++}" g++ clang++ || echo c++)" --version)"
}
