"""
Show all runs below out/ on a page, in Chinese and English, and start, stop, resume and compare them there.

    hf-pretrain board
    hf-pretrain board --language zh --port 7000
    hf-pretrain board --host 0.0.0.0 --allowed_hosts my-machine

Each run is a process of its own: it goes on after the end of the board, and a board shows the runs of terminals and of
other boards, too. By default, only this machine can open the page. The page needs the token in the printed address:
whoever opens it can start commands on this machine.
"""

from dataclasses import dataclass

from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.flags import flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.runtime.texts import LANGUAGES


# gradio is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.board.serving import open_board
    from hf_pretrain.inference.serving import check_ports


@dataclass
class BoardArguments:
    """Address and language."""

    host: str = flag("127.0.0.1", "0.0.0.0 admits the whole network.")
    allowed_hosts: list[str] = flag([], "More names of this machine.")
    port: int = flag(7861, "TCP port.", bounds="at least 0 and at most 65535")
    language: str | None = flag(None, "By default the browser's.", choices=tuple(LANGUAGES))


ARGUMENTS = (BoardArguments,)


def main(args: BoardArguments) -> None:
    check_ports(args.host, [args.port])
    open_board(**vars(args))


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
