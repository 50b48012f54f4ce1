_torchdevice() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" flag="" words="" at
    # bash takes --flag=value for three words, and zsh for one.
    [ "$word" = "=" ] && word=""
    [ "$before" = "=" ] && before="${COMP_WORDS[COMP_CWORD-2]}"
    case "$word" in --*=*) before="${word%%=*}" flag="${word%%=*}=" word="${word#*=}" ;; esac
    COMPREPLY=()
    case "${COMP_WORDS[1]}" in
        {{ splitting|join("|") }})
            for ((at = 2; at < COMP_CWORD; at++)); do
                case "${COMP_WORDS[at]}" in
                    "=") at=$((at + 1)) ;;
                    {{ valued|join("|") }}) [ "${COMP_WORDS[at+1]}" = "=" ] || at=$((at + 1)) ;;
                    -m*|-c*|-|--) return ;;
                    -*) ;;
                    *) return ;;
                esac
            done
            ;;
    esac
    case "${COMP_WORDS[1]} $before" in
{% for command in commands %}
{% for flag in command.flags if flag.choices %}
        "{{ command.name }} {{ flag.name }}") words="{{ flag.choices|join(" ") }}" ;;
{% endfor %}
{% endfor %}
        *)
            case "${COMP_WORDS[1]}" in
{% for command in commands %}
                {{ command.name }}) words="{{ (command.flags|map(attribute="name")|list + command.words)|join(" ") }}" ;;
{% endfor %}
            esac
            [ "$COMP_CWORD" -eq 1 ] && words="{{ commands|join(" ", attribute="name") }}"
            ;;
    esac
    COMPREPLY=($(compgen -P "$flag" -W "$words" -- "$word"))
}
complete -o default -F _torchdevice torchdevice
