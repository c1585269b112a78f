# Sourced by the launch scripts. With LAYOUT=auto, megacp-plan chooses all parallel layout flags that you do not set:
#     LAYOUT=auto NPROC=8 bash examples/pretrain_llm.sh --config examples/small.yaml --data-path DIR --save DIR
# PLAN contains additional flags for megacp-plan, for example PLAN="--network ethernet" or, on a machine without GPUs,
# PLAN="--gpu h100". CP_LAYOUT is unrelated: it sets --cp-layout, which divides a row among context-parallel ranks.

# Plan the parallel layout of a run on $1 ranks, and add `--config best.yaml` to its flags, the array `run`. Do nothing if
# LAYOUT is unset. A resumed run keeps its checkpoint's parallel layout if the number of ranks is the same.
#
# best.yaml is written to the folder of --save, which all machines share. Under Slurm without --save, it is written to
# the folder of the job. If $2 is `own`, each machine plans and uses a temporary file. The same flags, packs and GPUs give
# the same parallel layout, and ranks whose flags differ refuse to start.
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
    # Print to stderr, because stdout belongs to the run. The shell must split PLAN into words.
    # shellcheck disable=SC2086
    python -m megacp.plan.command --gpu here --world-size "$ranks" "${run[@]}" ${PLAN:-} \
        --output "$best" --overwrite >&2 || exit 2
    run+=(--config "$best")
    # The caller derives environment variables from these two values.
    TP=${TP:-$(sed -n 's/^tensor_model_parallel_size: //p' "$best")}
    SHARD=${SHARD:-$(sed -n 's/^data_parallel_sharding_strategy: //p' "$best")}
}
