"""
Write the page of a run, or one page that compares several runs.

    hf-pretrain compare out/pretrain-tiny
    hf-pretrain compare out/first out/second --output comparison.html

The page shows results, curves, samples and events. A page of several runs begins with the arguments and versions that
differ. A run writes its page, `report.html`, when it ends or stops. This recipe also writes the page of a run that
still trains, or that was killed. Directories without a run are left out. The page is in English or Chinese, as the
browser prefers, unless `--language` says which.
"""

from dataclasses import dataclass
from pathlib import Path

from hf_pretrain.reports.page import write_page
from hf_pretrain.run_directory.directory import REPORT_NAME
from hf_pretrain.run_directory.history import read_runs
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.runtime.flags import flag
from hf_pretrain.runtime.parser import parse_flags
from hf_pretrain.runtime.texts import LANGUAGES
from hf_pretrain.runtime.writing import check_output


@dataclass
class ComparisonArguments:
    """Runs and page."""

    runs: list[Path] = flag(help="Directories of runs (their --output_dir).", spelled="runs")
    output: str | None = flag(None, "File to write; by default the run's report.html, or comparison.html.")
    language: str | None = flag(None, "By default the browser's.", choices=tuple(LANGUAGES))


ARGUMENTS = (ComparisonArguments,)


def main(args: ComparisonArguments) -> None:
    path = args.runs[0] / REPORT_NAME if len(args.runs) == 1 else Path("comparison.html")
    if args.output is not None:
        check_output(args.output, "--output")
        path = Path(args.output)
    runs, left_out = read_runs(args.runs)
    for reason in left_out:
        print(f"Left out: {reason}")
    write_page(runs, path, language=args.language)
    print(f"Wrote {path}. Open it in a browser.")


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_flags(*ARGUMENTS))
