# Sourced by the launch scripts. LAYOUT=auto lets megacp-plan choose each flag of the layout that is not given:
#     LAYOUT=auto NPROC=8 bash examples/pretrain_llm.sh --config examples/small.yaml --data-path DIR --save DIR
# PLAN holds more flags for megacp-plan, for example PLAN="--network ethernet" or, on a machine without GPUs,
# PLAN="--gpu h100". CP_LAYOUT sets --cp-layout, which is something else: how context-parallel ranks share a row.

# Plan the layout of a run on $1 ranks and add `--config best.yaml` to its flags, the array `run`. Without LAYOUT nothing
# happens. A resumed run keeps the layout of its checkpoint as long as the number of ranks stays the same.
#
# best.yaml is written to the folder of --save, which all machines share; under Slurm without a --save to the folder of
# the job. If $2 is `own`, this machine is one of several that plan, and has a temporary file of its own: the same flags,
# packs and GPUs give the same layout, and ranks that do not agree on their flags refuse to start.
add_layout() {
    local ranks=$1 whose=${2:-} save='' before='' word
    case ${LAYOUT:-} in
    '') return ;;
    auto) ;;
    *)
        echo "error: LAYOUT is $LAYOUT, expected auto; CP_LAYOUT sets --cp-layout" >&2
        exit 2
        ;;
    esac
    for word in "${run[@]}"; do
        [[ $before != --save ]] || save=$word
        [[ $word != --save=* ]] || save=${word#--save=}
        [[ $word != --dry-run ]] || whose=own
        before=$word
    done
    # A URL is not a folder, and ~ after an equals sign is not expanded by the shell.
    if [[ $whose != own && -n $save && $save != *://* && $save != '~'* ]]; then
        best=$save/best.yaml
    elif [[ $whose != own && -n ${SLURM_JOB_ID:-} ]]; then
        best=best_$SLURM_JOB_ID.yaml
    else
        best=$(mktemp -d)/best.yaml
    fi
    # To stderr, because the output of the script is the output of the run. PLAN is split into words.
    # shellcheck disable=SC2086
    python -m megacp.plan.command --gpu here --world-size "$ranks" "${run[@]}" ${PLAN:-} \
        --output "$best" --overwrite >&2 || exit 2
    run+=(--config "$best")
    # Settings of the environment depend on these two.
    TP=${TP:-$(sed -n 's/^tensor_model_parallel_size: //p' "$best")}
    SHARD=${SHARD:-$(sed -n 's/^data_parallel_sharding_strategy: //p' "$best")}
}
