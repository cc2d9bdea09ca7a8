"""
Show all runs below out/ on a page, in Chinese and English, and start, stop, resume and compare them there.

    hf-pretrain board
    hf-pretrain board --language zh --port 7000
    hf-pretrain board --host 0.0.0.0 --allowed_hosts my-machine

Each run is a process of its own: it goes on after the end of the board, and a board shows the runs of terminals and of
other boards, too. By default, only this machine can open the page. The page needs the token in the printed address:
whoever opens it can start commands on this machine.
"""

import argparse

from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.parser import RecipeParser
from hf_pretrain.runtime.texts import LANGUAGES


# gradio is optional. If it is missing, one line tells the user how to install it.
with one_line_errors():
    from hf_pretrain.board.serving import open_board
    from hf_pretrain.inference.serving import check_ports


def main(args: argparse.Namespace) -> None:
    check_ports(args.host, [args.port])
    open_board(**vars(args))


def make_parser() -> RecipeParser:
    parser = RecipeParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 admits the whole network")
    parser.add_argument("--allowed_hosts", nargs="+", default=[], metavar="NAME", help="more names of this machine")
    parser.add_argument("--port", type=int, metavar="N", default=7861, help="TCP port")
    parser.add_argument("--language", choices=tuple(LANGUAGES), help="by default the browser's")
    return parser


if __name__ == "__main__":
    with one_line_errors():
        main(make_parser().parse_args())
