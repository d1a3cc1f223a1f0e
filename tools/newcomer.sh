#!/bin/sh
# From a clone to your own model on two ranks, with the README alone: its commands, in its order, in a new folder.
#
#     sh tools/newcomer.sh                      installs into a new environment: a minute, and 2 GB with torch
#     ENVIRONMENT=.venv sh tools/newcomer.sh    uses an environment that has paceline
set -eu
repository=$(cd "$(dirname "$0")/.." && pwd)
environment=${ENVIRONMENT:+$(cd "$ENVIRONMENT" && pwd)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

git clone --quiet "$repository" paceline
if [ -z "$environment" ]; then
    environment=$folder/environment
    python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet -c paceline/constraints.txt ./paceline # README: install
fi
PATH=$environment/bin:$PATH

# Train your own model: the block of the README, saved as script.py.
awk '/^<!-- file: script.py -->/ { found = 1; next } found && /^```$/ { exit } found && !/^```/' paceline/README.md >script.py
paceline launch -n 2 script.py
paceline ls

# Train a recipe.
paceline init my-project
cd my-project
paceline train recipe.yaml -n 2 train.pause_at=0.5
paceline train recipe.yaml -n 3 resume=auto
