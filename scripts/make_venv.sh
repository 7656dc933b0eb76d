#!/bin/sh
# make_venv.sh DIR PYTHON...: make a virtual environment at DIR with the first PYTHON that is 3.11 or newer and can.
#
# An environment that works already is left alone. Debian and Ubuntu ship Python without ensurepip, which a virtual
# environment needs: as root this installs the missing package, otherwise it names the command to run.
set -eu

dir=$1
shift

is_new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
can_make_venv='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

first_python() { # CODE PYTHON...: print the first PYTHON on which CODE exits with 0
    code=$1
    shift
    for python in "$@"; do
        if command -v "$python" >/dev/null 2>&1 && "$python" -c "$code" >/dev/null 2>&1; then
            echo "$python"
            return 0
        fi
    done
    return 1
}

die() {
    printf 'make: %s\n' "$@" >&2
    exit 1
}

if [ -x "$dir/bin/python" ] && "$dir/bin/python" -c "$is_new_enough" && "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

if ! python=$(first_python "$can_make_venv" "$@"); then
    if ! python=$(first_python "$is_new_enough" "$@"); then
        found=$(python3 --version 2>/dev/null) || found="no python3 at all"
        die "Python 3.11 or newer is needed; looked for: $*; found $found." \
            "Install one (on Debian 12+ or Ubuntu 24.04+: apt-get install python3 python3-venv)," \
            "or name one: make PYTHON=/path/to/python3 ..."
    fi
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if ! command -v apt-get >/dev/null 2>&1; then
        die "$python cannot make virtual environments: its modules venv and ensurepip are missing."
    elif [ "$(id -u)" -ne 0 ]; then
        die "$python cannot make virtual environments yet. Run this, then try again:" "    sudo apt-get install $package"
    fi
    echo "installing $package, which $python needs for a virtual environment"
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package"
    "$python" -c "$can_make_venv" || die "$python still cannot make virtual environments, though $package is installed."
fi

echo "making $dir with $("$python" --version) ($(command -v "$python"))"
"$python" -m venv --clear "$dir"
