"""`quintet serve`: run an instance. Its flags are the fields of `engine.config.ServeConfig`."""

import argparse

from engine.arguments import only
from engine.cli.doctor import lacking_for_cuda
from engine.cli.errors import USED_WRONGLY, CommandError
from engine.config import NOT_BUILT, ConfigError, ServeConfig
from engine.flags import add_flags, values_of


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command's flags, in groups."""
    parser = subparsers.add_parser(
        "serve",
        description="Run a model behind gRPC, in five kinds of process. Stop it with ^C: running streams finish first.",
        usage="quintet serve MODEL [flags]",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    add_flags(parser, ServeConfig)
    group = parser.add_argument_group("flags of vLLM whose feature is not built yet")
    for name, (neutral, feature) in NOT_BUILT.items():
        group.add_argument(name, type=only(neutral, feature), metavar=neutral, help=f"{feature}: only {neutral}")
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    config = config_of(args)
    if config.device == "cuda" and (lacking := lacking_for_cuda()):
        raise CommandError(f"--device cuda: {'; '.join(lacking)} (see `quintet doctor`)", USED_WRONGLY)
    from engine.supervisor import serve  # slow to import, and --help does not need it

    return serve(config)


def config_of(args: argparse.Namespace) -> ServeConfig:
    """The flags as a configuration; exits with status 2 where two of them contradict each other."""
    parser: argparse.ArgumentParser = args.parser
    try:
        return ServeConfig(**values_of(args, ServeConfig))
    except ConfigError as error:
        parser.error(str(error))
