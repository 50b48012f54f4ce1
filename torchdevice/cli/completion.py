"""``torchdevice completion``: a script by which a shell completes the words of this command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

_EXAMPLES = """examples:
  torchdevice completion bash >> ~/.bashrc
  torchdevice completion zsh >> ~/.zshrc
  torchdevice completion fish > ~/.config/fish/completions/torchdevice.fish"""

_BASH = """_torchdevice() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" flag="" words="" at
    # bash takes --flag=value for three words, and zsh for one.
    [ "$word" = "=" ] && word=""
    [ "$before" = "=" ] && before="${COMP_WORDS[COMP_CWORD-2]}"
    case "$word" in --*=*) before="${word%%%%=*}" flag="${word%%%%=*}=" word="${word#*=}" ;; esac
    COMPREPLY=()
    case "${COMP_WORDS[1]}" in
        %(splitting)s)
            for ((at = 2; at < COMP_CWORD; at++)); do
                case "${COMP_WORDS[at]}" in
                    "=") at=$((at + 1)) ;;
                    %(valued)s) [ "${COMP_WORDS[at+1]}" = "=" ] || at=$((at + 1)) ;;
                    -m*|-c*|-|--) return ;;
                    -*) ;;
                    *) return ;;
                esac
            done
            ;;
    esac
    case "${COMP_WORDS[1]} $before" in
%(values)s
        *)
            case "${COMP_WORDS[1]}" in
%(flags)s
            esac
            [ "$COMP_CWORD" -eq 1 ] && words="%(commands)s"
            ;;
    esac
    COMPREPLY=($(compgen -P "$flag" -W "$words" -- "$word"))
}
complete -o default -F _torchdevice torchdevice
"""

_ZSH = """(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""

_FISH = """function __torchdevice_in
    set -l words (commandline -opc)
    test "$words[2]" = $argv[1]; or return 1
    contains -- $argv[1] %(splitting)s; or return 0
    set -e words[1..2]
    while set -q words[1]
        switch $words[1]
            case %(valued)s
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
"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "completion",
        help="print what lets a shell complete this command",
        description="Print what lets a shell complete the commands, flags and values of torchdevice.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="the shell")
    parser.set_defaults(action=lambda options: _complete(options.shell, commands.choices))


def _complete(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> int:
    print(_SCRIPTS[shell](parsers), end="")
    return 0


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str], str]]:
    """Yield each long flag of a command, with the values that it takes where they are few, and its help."""
    for action in parser._actions:
        choices = list(map(str, action.choices or str(action.metavar or "").split("|")))
        for flag in action.option_strings:
            if flag.startswith("--"):
                yield flag, choices if len(choices) > 1 else [], action.help or ""


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return what a command takes: its flags, and the values of its arguments where they are few."""
    positional = [action for action in parser._actions if not action.option_strings]
    return [flag for flag, _, _ in _flags(parser)] + [word for each in positional for word in each.choices or ()]


def _splitting(parsers: Mapping[str, argparse.ArgumentParser]) -> tuple[list[str], list[str]]:
    """Return the commands that end in the words of a program, and their flags that are followed by a value."""
    found = {name: parser for name, parser in parsers.items() if getattr(parser, "split", None) is not None}
    actions = [action for parser in found.values() for action in parser._actions if action.nargs is None]
    return list(found), [flag for action in actions for flag in action.option_strings]


def _bash(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    splitting, valued = _splitting(parsers)
    values = [
        f'        "{name} {flag}") words="{" ".join(choices)}" ;;'
        for name, parser in parsers.items()
        for flag, choices, _ in _flags(parser)
        if choices
    ]
    flags = [f'                {name}) words="{" ".join(_words(parser))}" ;;' for name, parser in parsers.items()]
    return _BASH % {
        "splitting": "|".join(splitting),
        "valued": "|".join(valued),
        "values": "\n".join(values),
        "flags": "\n".join(flags),
        "commands": " ".join(parsers),
    }


def _zsh(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    return _ZSH + _bash(parsers)


def _fish(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    splitting, valued = _splitting(parsers)
    lines = [f"complete -c torchdevice -n __fish_use_subcommand -xa '{' '.join(parsers)}'"]
    for name, parser in parsers.items():
        seen = f"complete -c torchdevice -n '__torchdevice_in {name}'"
        for flag, choices, text in _flags(parser):
            first = text.partition(".")[0].replace("'", "\\'").replace("%%", "%")
            lines.append(f"{seen} -l {flag[2:]} -d '{first}'" + (f" -xa '{' '.join(choices)}'" if choices else ""))
        lines += [f"{seen} -xa '{word}'" for word in _words(parser) if not word.startswith("--")]
    return _FISH % {"splitting": " ".join(splitting), "valued": " ".join(valued)} + "\n".join(lines) + "\n"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
