# Makes .venv once and leaves it alone afterwards; sourced by scripts/test, scripts/demo and scripts/lint.
#
# Owns: finding Python, the virtual environment, installing torch (CPU build) and this project with its [dev] extra.
# A stamp, keyed by pyproject.toml and the checkout's place, makes the second run free and safe without a network.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PY=$VENV/bin/python
TORCH_VERSION=2.13.0
CPU_WHEELS=https://download.pytorch.org/whl/cpu

cd "$ROOT"
# Another environment that happens to be active must not leak into ours.
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH CONDA_PREFIX
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '%s\n' "· $*" >&2; }

die() { # die MESSAGE HINT
  printf 'sentinel: error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

may_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() { # apt_install PACKAGE...; quiet unless it fails
  say "installing system packages with apt-get: $*"
  local log
  log=$(mktemp)
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
    >"$log" 2>&1 </dev/null; then
    tail -n 5 "$log" >&2
    die "apt-get could not install: $*" "install them by hand, then run this again"
  fi
  rm -f "$log"
}

find_python() { # prints the first Python >= 3.11, or nothing
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
}

make_venv() {
  local python
  python=$(find_python)
  if [ -z "$python" ] && may_apt; then
    apt_install python3 python3-venv
    python=$(find_python)
  fi
  [ -n "$python" ] || die "no Python 3.11 or newer on PATH" "install one, or name it: PYTHON=/path/to/python3.11 $0"
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    may_apt || die "this Python cannot make virtual environments (ensurepip is absent)" \
      "as root: apt-get install python3-venv"
    apt_install python3-venv
  fi
  say "making .venv with $("$python" --version 2>&1)"
  "$python" -m venv --clear "$VENV" || die "could not make $VENV" "is the disk full, or the folder read-only?"
}

pip_install() { # shows the lines that say how far it is; the rest goes to the log
  set -o pipefail
  "$PY" -m pip install "$@" 2>&1 </dev/null | tee -a "$VENV/install.log" |
    { grep --line-buffered -E '^ *(Collecting|Downloading|Installing collected|Successfully|Building)' || true; } |
    cut -c1-110 >&2
}

cpu_index_answers() {
  "$PY" -c "import urllib.request as u; u.urlopen('$CPU_WHEELS/torch/', timeout=5).close()" 2>/dev/null
}

install_torch() {
  say "installing torch $TORCH_VERSION (CPU build; about 200 MB, once)"
  if cpu_index_answers && pip_install --extra-index-url "$CPU_WHEELS" "torch==$TORCH_VERSION"; then
    return
  fi
  say "the CPU wheel index does not answer; taking torch from your own package index"
  pip_install "torch==$TORCH_VERSION"
}

install_all() {
  : >"$VENV/install.log"
  install_torch && say "installing sentinel and its development tools" && pip_install -e '.[dev]' && return
  grep -E '^ERROR' "$VENV/install.log" | tail -n 2 >&2 || true
  die "could not install the Python packages" "is there a network? the whole log is .venv/install.log"
}

whole_venv() { # false also for one that was moved here: its commands still name the old place
  "$PY" -m pip --version >/dev/null 2>&1 && head -n 2 "$VENV/bin/pip" 2>/dev/null | grep -qF "$VENV/"
}

wanted_stamp() { { printf '%s\n%s\n' "$ROOT" "$TORCH_VERSION" && cat pyproject.toml; } | sha256sum | cut -d' ' -f1; }

bootstrap() {
  local wanted
  wanted=$(wanted_stamp)
  if [ "$(cat "$VENV/.stamp" 2>/dev/null)" = "$wanted" ] && "$PY" -c '' 2>/dev/null; then
    return
  fi
  if command -v flock >/dev/null; then # two scripts started at once install once
    exec 9>"$ROOT/.bootstrap.lock"
    flock 9
    [ "$(cat "$VENV/.stamp" 2>/dev/null)" = "$wanted" ] && return
  fi
  whole_venv || make_venv
  install_all
  printf '%s' "$wanted" >"$VENV/.stamp"
  say "ready"
}

bootstrap
