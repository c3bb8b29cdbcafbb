# Sourced by the other scripts: `make_venv EXTRAS` makes .venv at the root of the checkout and activates it.
# PYTHON names the interpreter (3.10 to 3.12; default python3). Nothing is installed twice.

make_venv() {
    local python="${PYTHON:-python3}" extras="$1" stamp
    if [ ! -x .venv/bin/python ]; then
        "$python" -m venv .venv
    fi
    . .venv/bin/activate
    stamp=".venv/$(cat pyproject.toml scripts/constraints.txt | sha256sum | cut -c1-16)-${extras}"
    if [ ! -e "$stamp" ]; then
        echo "installing specbuild[$extras] into .venv" >&2
        python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt --editable ".[$extras]" >&2
        touch "$stamp"
    fi
}
