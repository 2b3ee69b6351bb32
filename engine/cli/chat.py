"""`quintet chat`: a conversation in the terminal, or from a script's lines on standard input."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from contextlib import closing

from engine.cli.asking import add_request_arguments, options_of
from engine.cli.errors import complain
from engine.cli.printing import describe_error
from engine.cli.target import add_target_arguments, open_target
from quintet_client import ChatMessage, Client, GenerateOptions, QuintetError

HELP = """\
/help          this text
/reset         forget the conversation
/system TEXT   set the system message; without TEXT, remove it
/quit          leave, as does ^D
^C             stop the answer; the part that was shown stays in the conversation
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "chat",
        description="Talk to a model. Each line is a turn; /help lists the commands. ^C stops an answer.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_request_arguments(parser)
    add_target_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 1 when a turn failed and no terminal showed it."""
    interactive = sys.stdin.isatty()
    with open_target(args) as address, Client(address, timeout=args.timeout) as client:
        model = client.get_model_info().model
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() its line editing)
            sys.stderr.write(f"{model} at {address}. /help lists the commands.\n")
        chat = ChatLoop(client, args.system, options_of(args), _read_line, sys.stdout.write)
        chat.run(interactive)
    return 1 if chat.failed and not interactive else 0


def _read_line() -> str:
    return input("> " if sys.stdin.isatty() else "")


class ChatLoop:
    """The conversation so far, and the loop of turns. `read` gives the next line or raises EOFError."""

    def __init__(
        self,
        client: Client,
        system: str | None,
        options: GenerateOptions,
        read: Callable[[], str],
        write: Callable[[str], object],
    ) -> None:
        self._client = client
        self._options = options
        self._read = read
        self._write = write
        self.system = system
        self.turns: list[ChatMessage] = []
        self.failed = False

    def run(self, interactive: bool) -> None:
        """Take turns until /quit or the end of input. ^C at a terminal's prompt drops the line, elsewhere it raises."""
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not interactive:
                    raise
                self._write("\n(/quit or ^D to leave)\n")
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        match name:
            case "/help":
                self._write(HELP)
            case "/reset":
                self.turns.clear()
            case "/system":
                self.system = text.strip() or None
            case _:
                self.failed = True
                complain(f"unknown command {name}; /help lists the commands")

    def _turn(self, line: str) -> None:
        """Ask and stream. A failed turn leaves the conversation as it was."""
        question = ChatMessage(role="user", content=line)
        system = [ChatMessage(role="system", content=self.system)] if self.system is not None else []
        answer = ""
        try:
            with closing(self._client.generate_stream([*system, *self.turns, question], **self._options)) as chunks:
                for chunk in chunks:
                    answer += chunk.text
                    self._write(chunk.text)
                    sys.stdout.flush()
        except QuintetError as error:
            if answer:
                self._write("\n")
            self.failed = True
            complain(describe_error(error))
            return
        except KeyboardInterrupt:
            self._write(" …")
        except ValueError as error:
            self.failed = True
            complain(str(error))
            return
        self._write("\n")
        self.turns += [question, ChatMessage(role="assistant", content=answer)]
