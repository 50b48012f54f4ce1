function __torchdevice_in
    set -l words (commandline -opc)
    test "$words[2]" = $argv[1]; or return 1
    contains -- $argv[1] {{ splitting|join(" ") }}; or return 0
    set -e words[1..2]
    while set -q words[1]
        switch $words[1]
            case {{ valued|join(" ") }}
                set -e words[1]
            case '-m*' '-c*' - --
                return 1
            case '-*'
            case '*'
                return 1
        end
        set -e words[1]
    end
end
complete -c torchdevice -n __fish_use_subcommand -xa '{{ commands|join(" ", attribute="name") }}'
{% for command in commands %}
{% set seen = "complete -c torchdevice -n '__torchdevice_in " ~ command.name ~ "'" %}
{% for flag in command.flags %}
{{ seen }} -l {{ flag.name[2:] }} -d '{{ flag.help.replace("'", "\\'") }}'{% if flag.choices %} -xa '{{ flag.choices|join(" ") }}'{% endif %}

{% endfor %}
{% for word in command.words %}
{{ seen }} -xa '{{ word }}'
{% endfor %}
{% endfor %}
