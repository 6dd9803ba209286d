#!/usr/bin/env bash
# Installs what the example needs into .venv, or .venv-STACK, and runs it; "./run.sh help" lists the commands. The
# command `recsuite` of an installed library runs this file with its Python in RECSUITE_PYTHON: it installs nothing.
set -euo pipefail

here="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
venv="$here/.venv"
installed="${RECSUITE_PYTHON:-}"
library="${RECSUITE_LIBRARY:-$here/example/recsuite}"
name="run.sh" call="./run.sh"
if [[ -n "$installed" ]]; then name=recsuite call=recsuite; fi
of_a_clone="setup|test|smoke|soak|lint|docs"
unset RECSUITE_PYTHON RECSUITE_LIBRARY
# What sed changes in the lists of packages.
pins=""

# A clone calls its own code, also before anything is installed.
export PYTHONPATH="$here/example${PYTHONPATH:+:$PYTHONPATH}"

# Long enough for a slow connection; a longer wait is for something that hangs.
lock_deadline=3600

usage() {
  if [[ -z "$installed" ]]; then
    print_usage
    return
  fi
  # Without what needs a clone: the installation, tests and documents.
  print_usage | sed -E "/^ +\.\/run.sh ($of_a_clone) /d; /^  PYTHON /,\$d; s/install if needed, then //; s/\.\/run.sh/recsuite/"
}

print_usage() {
  cat <<'TEXT'
usage: ./run.sh [train] [FLAGS...]   install if needed, then train; "train --help" lists the first
                                     flags, "train --help_all" all of them
       ./run.sh dump [FLAGS...]      train, and write a full checkpoint to --save_dir after every epoch
       ./run.sh inc_dump [FLAGS...]  train, and write deltas: the rows that changed
       ./run.sh retrain --data_path PATH [FLAGS...]   train on newer data into the folder models, and promote
                                     the new model only if it is better; "retrain --help" lists its flags
       ./run.sh load [PATH] [FLAGS...]     evaluate the best checkpoint in --save_dir, or that in PATH; also
                                     called evaluate
       ./run.sh compact [FLAGS...]   merge deltas into one full checkpoint
       ./run.sh export PATH [FLAGS...]     write the best one into the new folder PATH, for a server
       ./run.sh recommend --user ID [FLAGS...]  print what the best checkpoint recommends
       ./run.sh score --users all --output PATH [FLAGS...]   write what it recommends to all users into Parquet
                                     files; "score --help" lists the flags
       ./run.sh serve [FLAGS...]     answer requests over HTTP with the best checkpoint; "serve --help" lists the
                                     flags
       ./run.sh schema PATH [FLAGS...]     write what the columns of your own tables in PATH seem to mean
                                     into a schema.toml beside them, for you to correct
       ./run.sh report RUN...        print a table of runs side by side, each a --report_dir or a folder of such
       ./run.sh doctor [FLAGS...]    install if needed, then examine this machine for what train with these
                                     FLAGS would start on it; status 1 if anything is a fault
       ./run.sh plan --hosts N [FLAGS...]  print where tables would lie on machines that are only described, what
                                     their ranks would send, and if it fits; "plan --help" lists its flags
       ./run.sh setup                only install
       ./run.sh test [PYTEST ARGS]   run the tests of the core; with --all those of extras and benchmarks too
       ./run.sh smoke [PYTEST ARGS]  test 1, 2 and 3 ranks on the GPUs there are, or without a GPU on the CPU; the
                                     last line says where and over what they ran
       ./run.sh soak [PYTEST ARGS]   run the long tests; SOAK_SECONDS for each of them (default: 600)
       ./run.sh lint                 run ruff, mypy and codespell
       ./run.sh docs                 build the documents as a web site into the folder site
       ./run.sh help                 print this

Environment:
  NPROC          processes on this machine (default: one per GPU, without GPU 2)
  NNODES         machines that train together (default: 1), or MIN:MAX: as many of them as are there
  RDZV_ENDPOINT  HOST:PORT of one of them, the same on each; needed when NNODES is above 1
  MAX_RESTARTS   how often ranks are started again after one has failed (default: 0); with --resume among
                 the FLAGS they continue from the last checkpoint
  VARIANT        cpu or cuda (default: cuda where nvidia-smi lists a GPU, else cpu)
  PYTHON         the Python, 3.10 or newer, that .venv is made with (default: python3)
  STACK          2.11, 2.13 or 2.14: the torch, with the torchrec and fbgemm that belong to it (default: 2.13);
                 another one than the default is in a folder of its own, such as .venv-2.14
TEXT
}

say() {
  printf '%s: %s\n' "$name" "$*" >&2
}

# fail STATUS SENTENCE: status 2 is a mistake in the call, 1 a step that failed.
fail() {
  say "${@:2}"
  exit "$1"
}

# --- the environment ---------------------------------------------------------------------------------

count_gpus() {
  # grep -c prints 0 and fails when there is none.
  { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
}

read_variant() {
  gpus="$(count_gpus)"
  variant="${VARIANT:-}"
  case "$variant" in
    cpu | cuda) ;;
    "") if ((gpus > 0)); then variant=cuda; else variant=cpu; fi ;;
    *) fail 2 "VARIANT=$variant is not known; give cpu or cuda" ;;
  esac
}

read_launch() {
  local default=2
  if [[ "$variant" == cuda ]] && ((gpus > 0)); then default="$gpus"; fi
  nproc="${NPROC:-$default}"
  nnodes="${NNODES:-1}"
  [[ "$nproc" =~ ^[1-9][0-9]*$ ]] || fail 2 "NPROC=$nproc is not a number of processes; give 1 or more"
  if ! [[ "$nnodes" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || ((${nnodes%:*} > ${nnodes#*:})); then
    fail 2 "NNODES=$nnodes is not a number of machines; give 1 or more, or MIN:MAX"
  fi
  max_restarts="${MAX_RESTARTS:-0}"
  [[ "$max_restarts" =~ ^(0|[1-9][0-9]*)$ ]] ||
    fail 2 "MAX_RESTARTS=$max_restarts is not a number of restarts; give 0 or more"
  if ((${nnodes#*:} > 1)) && [[ -z "${RDZV_ENDPOINT:-}" ]]; then
    fail 2 "NNODES=$nnodes needs RDZV_ENDPOINT, the HOST:PORT of one of the machines"
  fi
  if ((${nnodes#*:} > 1)) && [[ ! "$RDZV_ENDPOINT" =~ .:[1-9][0-9]*$ ]]; then
    fail 2 "RDZV_ENDPOINT=$RDZV_ENDPOINT has no port; give the HOST:PORT of one of the machines"
  fi
}

# The versions are those of STACKS in recsuite.runtime.host.
read_stack() {
  local torch torchrec fbgemm
  case "${STACK:-2.13}" in
    2.11) torch=2.11.0 torchrec=1.6.1 fbgemm=1.6.0 ;;
    2.13) return ;;
    2.14) torch=2.14.1 torchrec=1.9.2 fbgemm=1.9.0 ;;
    *) fail 2 "STACK=$STACK is not known; give 2.11, 2.13 or 2.14" ;;
  esac
  pins="s/^torch([=!]=)[^+]*/torch\\1$torch/; s/^torchrec==.*/torchrec==$torchrec/; s/^(fbgemm.*)==.*/\\1==$fbgemm/"
  venv="$here/.venv-$STACK"
}

# The one in $venv if there is one, else the one to make it with.
find_python() {
  if [[ -n "$installed" ]]; then
    python="$installed"
    return
  fi
  python="${PYTHON:-python3}"
  if [[ -x "$venv/bin/python" ]]; then python="$venv/bin/python"; fi
  command -v "$python" >/dev/null || fail 2 "$python is not found; set PYTHON to a Python 3.10 or newer"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail 2 "$python is $("$python" -V 2>&1); delete ${venv##*/} if there is one and set PYTHON to 3.10 or newer"
}

# --- the installation --------------------------------------------------------------------------------

# set_up [dev | docs]: after this $venv holds the variant's packages, with "dev" those of test and lint too; with
# "docs" those of the site alone.
set_up() {
  if [[ -n "$installed" ]]; then return; fi
  install_lists "$@"
  python="$venv/bin/python"
}

install_lists() {
  if [[ "$variant" == cuda ]]; then base=requirements-cuda.txt; else base=requirements.txt; fi
  local lists=("$base") list
  case "${1:-}" in dev) lists+=(requirements-dev.txt) ;; docs) lists=(requirements-docs.txt) ;; esac
  if are_installed "${lists[@]}"; then return; fi
  if ! { mkdir -p "$venv" && [[ -w "$venv" ]] && touch "$venv/.lock"; } 2>/dev/null; then
    fail 1 "$(id -un) may not write $venv, where packages are to be installed; make a clone of your own, or" \
      "have its owner call ${pins:+STACK=$STACK }./run.sh setup$([[ "$variant" == cuda ]] && echo " with VARIANT=cuda")"
  fi
  {
    take_lock
    make_venv
    for list in "${lists[@]}"; do
      # Another call may have installed it before this one had the lock.
      if is_installed "$list"; then continue; fi
      if [[ "$list" == "$base" ]]; then install_base; else install_extra "$list"; fi
    done
  } 9>"$venv/.lock"
  local again="${pins:+STACK=$STACK }./run.sh"
  say "installed; $again trains, $again test runs the tests, $again help lists the rest"
}

take_lock() {
  if flock -n 9; then return; fi
  say "waiting for another run.sh that installs into ${venv##*/}"
  flock -w "$lock_deadline" 9 ||
    fail 1 "waiting for another run.sh failed: it still installs after $lock_deadline seconds"
}

make_venv() {
  if pip --version >/dev/null 2>&1; then return; fi
  say "making ${venv##*/}"
  # A link to a Python that is gone would stay.
  if [[ ! -e "$venv/bin/python" ]]; then rm -f "$venv/bin/"python*; fi
  logged "making ${venv##*/}" "$python" -m venv "$venv"
}

install_base() {
  local other=fbgemm-gpu flags=(--no-deps) size="510 MB"
  if [[ "$variant" == cuda ]]; then other=fbgemm-gpu-cpu flags=() size="3 GB"; fi
  rm -f "$(stamp_of "$base")"
  # Both wheels own the same files, and pip takes any build of torch for the pinned one: all three go.
  if pip show -q "$other" >/dev/null 2>&1; then
    say "removing the other variant's packages"
    logged "removing the other variant's packages" pip uninstall -y torch fbgemm-gpu fbgemm-gpu-cpu
  fi
  install "$base" "$size" ${flags[@]+"${flags[@]}"}
  if [[ "$variant" == cpu ]]; then complete_torch; fi
  # setuptools is one of the pinned packages.
  # A container image has the library without its metadata, and finds it by PYTHONPATH.
  if [[ -f "$here/pyproject.toml" ]]; then
    logged "installing recsuite" pip install --no-deps --no-build-isolation -e "$here"
  fi
  write_stamp "$base"
}

# An index without CPU builds gave the CUDA build of torch, which does not start without NVIDIA's libraries.
complete_torch() {
  if ! pip show torch 2>/dev/null | grep '^Requires:.*nvidia' >/dev/null; then return; fi
  say "installing NVIDIA's libraries, about 2 GB, as pip found only the CUDA build of torch; to avoid it" \
    "delete ${venv##*/} and set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds"
  logged "installing NVIDIA's libraries for torch" pip install "$(packages_of "$base" | grep '^torch==')"
}

# install_extra LIST: a list of which every package is named.
install_extra() {
  local size="60 MB"
  if [[ "$1" == requirements-docs.txt ]]; then size="25 MB"; fi
  rm -f "$(stamp_of "$1")"
  install "$1" "$size" --no-deps
  write_stamp "$1"
}

# install LIST SIZE [PIP FLAGS...]
install() {
  local list="$1" size="$2"
  shift 2
  say "installing $list, about $size to download"
  packages_of "$list" >"$venv/$list"
  logged "installing $list" pip install "$@" -r "$venv/$list"
}

packages_of() {
  sed -E "$pins" "$here/$1"
}

pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

# logged STEP COMMAND...: shows what pip collects and installs, and all else only if the command fails.
logged() {
  local step="$1" log="$venv/.setup.log" status=0 shown
  shift
  exec {shown}> >(tee "$log" | while IFS= read -r line; do
    case "$line" in "Collecting "* | "Installing "*) say "  $line" ;; esac
  done)
  local showing=$!
  "$@" >&"$shown" 2>&1 || status=$?
  exec {shown}>&-
  # Until all of it is in the log.
  wait "$showing"
  ((status == 0)) || {
    tail -n 15 "$log" >&2
    fail 1 "$step failed; its last lines are above, all of them in $log"
  }
}

# A stamp is written last and tells what was installed, so that a half-finished installation has none.
is_installed() {
  local stamp
  stamp="$(stamp_of "$1")"
  [[ -f "$stamp" && "$(<"$stamp")" == "$(fingerprint "$1")" ]]
}

are_installed() {
  local list
  for list in "$@"; do is_installed "$list" || return 1; done
}

write_stamp() {
  fingerprint "$1" >"$(stamp_of "$1")"
}

# The variants share a stamp: $venv holds one of them.
stamp_of() {
  case "$1" in
    requirements-dev.txt) echo "$venv/.installed-dev" ;;
    requirements-docs.txt) echo "$venv/.installed-docs" ;;
    *) echo "$venv/.installed" ;;
  esac
}

fingerprint() {
  {
    packages_of "$1"
    echo "$variant"
    "$venv/bin/python" -V 2>&1 || true
  } | sha256
}

sha256() {
  if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi
}

# --- the subcommands ---------------------------------------------------------------------------------

train() {
  prepare "$@"
  local script=example.py chosen=""
  if [[ " $* " == *" --data_path"[\ =]* ]]; then
    chosen="$("$python" -m recsuite.tools.choose_script "$@")"
    # Quoted words: the script, then its flags.
    eval "set -- $chosen"
    script="$1"
    shift
  fi
  local where=(--standalone)
  if ((${nnodes#*:} > 1)); then
    where=(--nnodes="$nnodes" --rdzv_backend=c10d --rdzv_endpoint="$RDZV_ENDPOINT")
  fi
  if ((max_restarts > 0)); then
    where+=(--max_restarts="$max_restarts")
    [[ " $* " == *" --resume "* ]] || say "without --resume each of MAX_RESTARTS=$max_restarts starts from the beginning, and requires" \
      "--move_aside if there are checkpoints by then"
  fi
  local launched=("${where[@]}" --nproc_per_node="$nproc" "$here/example/$script" "$@")
  [[ -z "$chosen" ]] || say "the command is$(printf ' %q' "${python%/*}/torchrun" "${launched[@]}")"
  launch "${launched[@]}"
}

# launch ARGS...: the arguments of torchrun.
launch() {
  local module=recsuite.extras.launcher
  if [[ ! -d "$library/extras/launcher" ]]; then
    say "$module is not installed: torchrun starts the ranks, and its status after a mistake is 1"
    module=torch.distributed.run
  fi
  exec "$python" -m "$module" "$@"
}

# extra MODULE ARGS...: the module is a file in recsuite/extras.
extra() {
  [[ -f "$library/extras/$1.py" ]] ||
    fail 2 "this requires recsuite.extras.${1//\//.}, which is not installed; get the whole repository"
  exec "$python" -m "recsuite.extras.${1//\//.}" "${@:2}"
}

# alone FLAGS...: one process, and nothing is launched.
alone() {
  prepare "$@"
  exec "$python" "$here/example/example.py" "$@"
}

one_machine() {
  ((${nnodes#*:} == 1)) || fail 2 "$1 runs on one machine, and NNODES is $nnodes"
}

# score FLAGS...: its script checks the flags, which are not those of the example.
score() {
  read_launch
  one_machine score
  set_up
  set_environment
  if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then nproc=1; fi
  launch --standalone --nproc_per_node="$nproc" "$here/example/score.py" "$@"
}

# retrain FLAGS...: it launches the script that fits the data.
retrain() {
  read_launch
  one_machine retrain
  set_up
  set_environment
  extra retrain --nproc_per_node="$nproc" "$@"
}

# report RUN...: needs no flags of the example, and no launch.
report() {
  set_up
  extra reports/compare "$@"
}

# plan FLAGS...: machines and tables of its own flags, or the tables of a training; nothing is launched.
plan() {
  set_up
  set_environment
  exec "$python" "$here/example/plan.py" "$@"
}

# serve FLAGS...: one process with flags of its own.
serve() {
  set_up
  set_environment
  exec "$python" "$here/example/serve.py" "$@"
}

# It sees what local rank 0 of train's launch would see.
doctor() {
  read_launch
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE="$nproc" LOCAL_WORLD_SIZE="$nproc" MASTER_ADDR=localhost MASTER_PORT=0
  alone --doctor "$@"
}

# with_path MODE [PATH] [FLAGS...]: the arguments of the modes that take a folder, with their flag before it.
with_path() {
  local mode="$1"
  shift
  if [[ $# != 0 && "$1" != -* ]]; then
    set -- "--$mode=$1" "${@:2}"
  elif [[ "$mode" == load ]]; then
    set -- --load "$@"
  elif [[ " $* " != *" --help"* && " $* " != *" -h "* ]]; then
    fail 2 "$mode needs a path behind it, $call $mode PATH: $(needed_by "$mode")"
  fi
  if [[ "$mode" == load ]]; then train "$@"; else alone "$@"; fi
}

# Meaning of the path behind a mode.
needed_by() {
  if [[ "$1" == schema ]]; then echo "the file or folder of your tables"; else echo "the folder to write"; fi
}

# prepare FLAGS...: what comes before the example starts.
prepare() {
  read_launch
  # The flags are checked once, by one process, before anything is installed or launched.
  "$python" -m recsuite.config "$@"
  local flag
  for flag in "$@"; do
    case "$flag" in -h | --help | --help_all) exit 0 ;; esac
  done
  set_up
  set_environment
}

set_environment() {
  # The example sets its own threads; without this torchrun prints a banner about them.
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  limit_spinning
  # The CPU wheel of fbgemm has no kernels for a GPU that torch may see.
  if [[ "$variant" == cpu ]]; then
    export CUDA_VISIBLE_DEVICES=""
    ((gpus == 0)) || say "VARIANT=cpu uses the CPU alone; GPUs on this machine that are not used: $gpus"
  fi
}

# Threads that wait for each other would spin, and beside another program a step would take 20 times as long.
limit_spinning() {
  [[ -n "${OMP_WAIT_POLICY:-}" ]] || export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
}

run_tests() {
  set_up dev
  limit_spinning
  cd -- "$here"
  # Tests start hundreds of Pythons, each of which would compile what it imports.
  unset PYTHONDONTWRITEBYTECODE
  exec "$venv/bin/python" -m pytest "$@"
}

# Each launch has a deadline of its own.
smoke() {
  run_tests -m multi_gpu --smoke -n 0 --timeout 0 -q "$@"
}

soak() {
  run_tests --all -m soak -n 0 --timeout 0 "$@"
}

lint() {
  set_up dev
  cd -- "$here"
  check ruff check .
  check ruff format --check .
  check mypy
  check codespell_lib
}

# The pages are on disk: nothing of the library is imported, so a clone builds the site without torch.
build_site() {
  set_up docs
  cd -- "$here"
  # mkdocs-material prints an advertisement of its makers on every build unless this is set.
  NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --quiet || fail 1 "docs: the site could not be built"
  say "the site is in $here/site; to read it: $venv/bin/python -m http.server --directory $here/site"
}

check() {
  "$venv/bin/python" -m "$@" || fail 1 "lint: $* failed"
}

main() {
  # Flags alone mean train.
  local command=train
  case "${1:-train}" in
    help | -h | --help) command=help ;;
    train | retrain | dump | inc_dump | load | evaluate | compact | export | recommend | score | serve | schema | report | doctor | plan | setup | test | smoke | soak | lint | docs)
      command="${1:-train}"
      shift "$(($# > 0))"
      ;;
    -*) ;;
    *) fail 2 "unknown subcommand $1; '$call help' lists them" ;;
  esac
  if [[ -n "$installed" && "$command" =~ ^($of_a_clone)$ ]]; then
    fail 2 "$command requires a clone of the repository"
  fi
  case "$command" in setup | lint | docs) [[ $# == 0 ]] || fail 2 "$command takes no arguments; found $1" ;; esac
  if [[ "$command" == help ]]; then
    usage
    return
  fi
  read_variant
  read_stack
  find_python
  case "$command" in
    setup) set_up ;;
    train) train "$@" ;;
    dump | inc_dump | compact) train "--$command" "$@" ;;
    load | export | schema) with_path "$command" "$@" ;;
    evaluate) with_path load "$@" ;;
    recommend) alone --recommend "$@" ;;
    score) score "$@" ;;
    retrain) retrain "$@" ;;
    serve) serve "$@" ;;
    report) report "$@" ;;
    doctor) doctor "$@" ;;
    plan) plan "$@" ;;
    test) run_tests "$@" ;;
    smoke) smoke "$@" ;;
    soak) soak "$@" ;;
    lint) lint ;;
    docs) build_site ;;
  esac
}

main "$@"
