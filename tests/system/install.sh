#!/bin/sh
# Installs what the system tests start: an ssh server, network tools, SLURM and a browser (Debian or Ubuntu, as root).
# It acts only where PACELINE_SYSTEM_TESTS=1, so that a plain `make test` never changes anybody's machine. Services are
# not started: each test starts its own, in its own folder, and ends them.
set -eu

if [ "${PACELINE_SYSTEM_TESTS:-}" != 1 ]; then
    echo "install.sh: PACELINE_SYSTEM_TESTS is not 1; nothing installed"
    exit 0
fi

packages="openssh-server openssh-client iproute2 nftables slurm-wlm munge chromium"
missing=""
for package in $packages; do
    state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
if [ -z "$missing" ]; then
    exit 0
fi

# Debian asks this file whether a package may start its services; 101 is no.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi

export DEBIAN_FRONTEND=noninteractive
lock="DPkg::Lock::Timeout=300"  # another installation may be under way
apt-get -o "$lock" -qq update
# shellcheck disable=SC2086  # a list of names
apt-get -o "$lock" -qq install --no-install-recommends $missing >/dev/null
