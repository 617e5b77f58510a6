"""The `kvcourse` command: lab, doctor, weights, bench.

Each subcommand's code is imported when it is called, so that `kvcourse --help` answers at once.
"""

import argparse
import sys
from importlib import import_module

# What `kvcourse bench NAME` runs: a module with add_arguments(parser) and main(args) -> exit status or None.
BENCHES = {
    "numpy": "kvcourse.bench.numpy_gpt2",
    "torch": "kvcourse.bench.torch_gpt2",
    "heads": "kvcourse.bench.heads",
    "kernel": "kvcourse.bench.kernel",
    "quality": "kvcourse.bench.quality",
    "paging": "kvcourse.bench.paging",
}


class CommandError(Exception):
    """A command cannot go on; the message is the one line the reader sees."""


def parser():
    """The command line: one subcommand each for lab, doctor, weights and bench."""
    top = argparse.ArgumentParser(prog="kvcourse", description="An interactive course on the KV cache.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    lab = commands.add_parser("lab", help="open the course in JupyterLab, on your own copy of the chapters")
    lab.add_argument("chapter", nargs="?", help="chapter to open: 01, 01_the_waste (default: 00, start here)")
    lab.add_argument(
        "--fresh",
        nargs="?",
        const="all",
        metavar="CHAPTER",
        help="start CHAPTER anew (all of them when none is named); yours is kept beside it",
    )
    lab.add_argument("--port", type=int, default=8888, help="port of the server (default: %(default)s)")
    lab.add_argument(
        "--no-browser", action="store_true", help="print the address instead of opening a browser"
    )
    lab.add_argument(
        "--no-server", action="store_true", help="only bring your copy of the chapters up to date"
    )
    lab.add_argument(
        "jupyter",
        nargs="*",
        metavar="-- OPTION",
        help="after `--`: options for JupyterLab itself, such as --ip=0.0.0.0",
    )

    commands.add_parser("doctor", help="check Python, packages, widgets, weights, GPU and memory")

    weights = commands.add_parser("weights", help="list, fetch or verify model weights")
    actions = weights.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="which models the course knows and where they lie")
    fetch = actions.add_parser("fetch", help="download a model into your own folder")
    fetch.add_argument("name")
    verify = actions.add_parser("verify", help="compare every file with its recorded SHA-256")
    verify.add_argument("names", nargs="*", metavar="NAME", help="default: every model on this machine")

    bench = commands.add_parser("bench", help="measure this machine: " + ", ".join(BENCHES))
    bench.add_argument("what", choices=sorted(BENCHES))
    bench.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="see `kvcourse bench NAME --help`"
    )
    return top


def _run_bench(args):
    module = import_module(BENCHES[args.what])
    options = argparse.ArgumentParser(
        prog=f"kvcourse bench {args.what}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(options)
    return module.main(options.parse_args(args.rest))


def _run(args):
    if args.command == "bench":
        return _run_bench(args)
    return import_module(f"kvcourse.cli.{args.command}").main(args)


def main(argv=None):
    """Run one command; returns the exit status. Expected failures become one line on stderr and status 1."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # What follows `--` is JupyterLab's; argparse would take its first word for the chapter.
    argv, for_jupyter = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    )
    args = parser().parse_args(argv)
    from kvcourse.fetch import DamagedFile, DownloadFailed
    from kvcourse.paths import BadSetting

    try:
        if getattr(args, "jupyter", None):
            raise CommandError(
                f"lab opens one chapter, {args.jupyter[0]!r} is one too many: "
                f"JupyterLab's own options follow `--`"
            )
        args.jupyter = for_jupyter
        return _run(args) or 0
    except (CommandError, DamagedFile, DownloadFailed, BadSetting) as error:
        print(f"kvcourse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvcourse: interrupted", file=sys.stderr)
        return 130
