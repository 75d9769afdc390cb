#compdef cachectl
# Completion of cachectl for zsh.

_cachectl_slots() {
    local -a slots
    # Without a worker, or without the right to ask it, there is nothing to offer.
    slots=(${(f)"$(cachectl ${opt_args[--run-dir]:+--run-dir ${opt_args[--run-dir]}} --timeout 1 --json list 2>/dev/null |
        sed -n 's/^ *"slot": \([0-9]*\),$/\1/p')"})
    compadd -a slots
}

_cachectl() {
    local -a commands
    commands=(
        'stats:what is held and what happened since the worker started'
        'list:all snapshots, one a line'
        'show:all there is to know of one snapshot'
        'tree:snapshots under those that they extend'
        'explain:why a request started where it did'
        'diff:where two stored conversations part'
        'evict:remove snapshots, named or described'
        'flush:remove all snapshots that are not pinned'
        'verify:hits that were computed again and compared'
        'pin:keep a snapshot whatever happens'
        'unpin:let a pinned snapshot be evicted again'
        'export:write snapshots to a directory, from the disk cache'
        'import:take snapshots of a directory into the disk cache'
        'warm:compute a prompt in advance and pin it'
        'watch:one line a second until interrupted'
        'events:what happens to the cache, one line each, until interrupted'
        'top:how full, how fast and what was used last, on the whole screen'
    )
    local context state line
    typeset -A opt_args
    _arguments -C \
        '--help[show help]' \
        '--run-dir[run directory of the daemon]:directory:_files -/' \
        '--endpoint[where the worker takes commands over TCP]:address:' \
        '--curve-key[file of CURVE keys]:file:_files' \
        '--json[print JSON instead of tables]' \
        '--timeout[seconds to wait for an answer]:seconds:' \
        '1:command:->command' \
        '*::argument:->argument'
    case $state in
        command) _describe command commands ;;
        argument)
            case ${line[1]} in
                show | pin | unpin)
                    _arguments '--json' '(1)--digest[the one whose digest begins like this]:digest:' \
                        '(--digest)1:slot:_cachectl_slots' ;;
                export)
                    _arguments '--json' '(--tenant --all)--digest[the one whose digest begins like this]:digest:' \
                        '(--digest --all)--tenant[all of one tenant]:tenant:' \
                        '(--digest --tenant)--all[all that are on disk]' \
                        '1:directory:_files -/' '*:slot:_cachectl_slots' ;;
                import) _arguments '--json' '1:directory:_files -/' ;;
                diff) _arguments '--json' '1:conversation:_cachectl_slots' '2:conversation:_cachectl_slots' ;;
                evict)
                    _arguments '--json' '--dry-run[say what would go, and leave it]' \
                        '--tier[from this tier only]:tier:(host disk)' \
                        '(--older --tenant --to *)--digest[the one whose digest begins like this]:digest:' \
                        '(--digest --tenant --to *)--older[all not used for so long]:age:' \
                        '(--digest --older --to *)--tenant[all of one tenant]:tenant:' \
                        '(--digest --older --tenant *)--to[those used longest ago]:size:' \
                        '*:slot:_cachectl_slots' ;;
                flush) _arguments '--json' '--dry-run[say what would go, and leave it]' ;;
                events) _arguments '--json' '--past[begin with the last ones]:count:' ;;
                verify) _arguments '--json' '--wait[until none is pending]' ;;
                warm)
                    _arguments '--json' '--url[where the gateway listens]:url:' \
                        '--api[of a request]:api:(chat messages responses)' \
                        '--api-key-file[holds the key of the tenant to warm for]:file:_files' \
                        '1:prompt:_files' ;;
                *) _arguments '--json' ;;
            esac ;;
    esac
}

_cachectl "$@"
