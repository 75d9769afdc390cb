# Completion of cachectl for bash.

_cachectl_slots() {
    # Without a worker, or without the right to ask it, there is nothing to offer.
    "$1" "${@:2}" --timeout 1 --json list 2>/dev/null | sed -n 's/^ *"slot": \([0-9]*\),$/\1/p'
}

_cachectl() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local command="" where=() index
    COMPREPLY=()
    for ((index = 1; index < COMP_CWORD; index++)); do
        case ${COMP_WORDS[index]} in
            --run-dir) where+=(--run-dir "${COMP_WORDS[index + 1]}"); ((index++)) ;;
            --endpoint | --curve-key) where+=("${COMP_WORDS[index]}" "${COMP_WORDS[index + 1]}"); ((index++)) ;;
            --timeout) ((index++)) ;;
            -*) ;;
            *) command=${COMP_WORDS[index]}; break ;;
        esac
    done
    case $previous in
        --run-dir) mapfile -t COMPREPLY < <(compgen -d -- "$current"); return ;;
        --api-key-file | --curve-key) mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;
        --tier) mapfile -t COMPREPLY < <(compgen -W "host disk" -- "$current"); return ;;
        --api) mapfile -t COMPREPLY < <(compgen -W "chat messages responses" -- "$current"); return ;;
        --endpoint | --timeout | --digest | --older | --tenant | --to | --url | --past) return ;;
    esac
    local offered
    case $command in
        "") offered="--help --run-dir --endpoint --curve-key --json --timeout
            stats list show tree explain diff evict flush verify pin unpin export import warm watch events top" ;;
        diff) offered="--help --json" ;;
        show | pin | unpin) offered="--help --json --digest" ;;
        evict) offered="--help --json --digest --older --tenant --to --tier --dry-run" ;;
        export) offered="--help --json --digest --tenant --all" ;;
        flush) offered="--help --json --dry-run" ;;
        verify) offered="--help --json --wait" ;;
        events) offered="--help --json --past" ;;
        warm) offered="--help --json --url --api --api-key-file" ;;
        *) offered="--help --json" ;;
    esac
    case $command,$current in
        *,-*) ;;
        show,* | pin,* | unpin,* | diff,* | evict,*)
            offered=$(_cachectl_slots "${COMP_WORDS[0]}" "${where[@]}") ;;
        warm,*) mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;
        export,* | import,*) mapfile -t COMPREPLY < <(compgen -d -- "$current"); return ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$offered" -- "$current")
}

complete -F _cachectl cachectl
