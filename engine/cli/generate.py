"""`quintet generate`: one prompt, the answer streamed to the terminal."""

import argparse
import json
import sys
import time
from contextlib import closing
from typing import Any

from engine.bench.clock import TokenClock
from engine.cli.asking import add_request_arguments, conversation, options_of
from engine.cli.errors import USED_WRONGLY, CommandError
from engine.cli.printing import finish_record, stats_lines
from engine.cli.target import add_target_arguments, open_target
from quintet_client import Client, GenerateOptions, Prompt
from quintet_client.v1 import inference_pb2 as pb


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "generate",
        description="Answer one prompt, streamed to the terminal. ^C cancels the request.",
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="text of the prompt; read from standard input if missing or -"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat", action="store_true", help="send PROMPT as a chat message (default if the model has a chat template)"
    )
    kind.add_argument("--raw", action="store_true", help="send PROMPT as plain text to continue")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument(
        "--stats", action="store_true", help="print latencies and tokens per second to stderr afterwards"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the stream")
    add_request_arguments(parser)
    add_target_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 answered; everything else is raised."""
    if args.raw and args.system is not None:
        raise CommandError("--system is for a chat, not for --raw text", USED_WRONGLY)
    text = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    with open_target(args) as address, Client(address, timeout=args.timeout) as client:
        try:
            return _answer(client, _prompt(client, args, text), options_of(args), args)
        except ValueError as error:  # a number that no message can hold
            raise CommandError(str(error)) from None


def _prompt(client: Client, args: argparse.Namespace, text: str) -> Prompt:
    wants_chat = args.chat or args.system is not None
    if wants_chat or (not args.raw and client.get_model_info().has_chat_template):
        return conversation(args.system, text)
    return text


def _answer(client: Client, prompt: Prompt, options: GenerateOptions, args: argparse.Namespace) -> int:
    clock = TokenClock(time.monotonic())
    answer = pb.GenerateResponse()
    output = answer.outputs.add()
    last = pb.GenerateChunk()
    with closing(client.generate_stream(prompt, **options)) as chunks:
        for chunk in chunks:
            clock.count(len(chunk.token_ids), time.monotonic())
            if chunk.HasField("prompt"):
                answer.prompt.CopyFrom(chunk.prompt)
            output.text += chunk.text
            output.token_ids.extend(chunk.token_ids)
            last = chunk
            if not args.json:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    if args.json:
        sys.stdout.write(json.dumps(_record(answer, last, clock), ensure_ascii=False) + "\n")
    elif not output.text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    if args.stats and not args.json:
        sys.stderr.write("\n" + "\n".join(stats_lines(clock, last)) + "\n")
    return 0


def _record(answer: pb.GenerateResponse, last: pb.GenerateChunk, clock: TokenClock) -> dict[str, Any]:
    output, timings = answer.outputs[0], last.timings
    return {
        "request_id": answer.prompt.request_id,
        "model": answer.prompt.model,
        "seed": answer.prompt.seed,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish": finish_record(last.finish),
        "prompt_tokens": last.usage.prompt_tokens,
        "cached_tokens": last.usage.cached_tokens,
        "completion_tokens": last.usage.completion_tokens,
        "queue_ms": timings.queue_ms,
        "prefill_ms": timings.prefill_ms,
        "decode_ms": timings.decode_ms,
        **clock.numbers(),
    }
