"""Talk to a served model with the openai package.

    kbit serve MODEL --continuous-batching --port 8000
    python examples/client.py MODEL "What is a codebook?" [--url http://127.0.0.1:8000/v1] [--tokens 64]

MODEL is the same path or name in both commands. openai comes with kbit's extra `serve`.
"""

import argparse
import sys

from openai import APIConnectionError, APIStatusError, OpenAI, OpenAIError


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="its name or path, as the server was started with")
    parser.add_argument("question", help="what to ask it")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    return parser.parse_args()


def ask(args: argparse.Namespace) -> None:
    """Print the answer as it comes."""
    client = OpenAI(base_url=args.url, api_key="unused")  # the server asks for none
    answer = client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=args.tokens,
        temperature=0,
        stream=True,
    )
    for chunk in answer:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    args = arguments()
    try:
        ask(args)
    except APIConnectionError as error:
        sys.exit(f"{args.url}: {error} Does the server run?")
    except APIStatusError as error:
        hint = " Does the URL end in /v1?" if error.status_code == 404 else ""
        sys.exit(f"{args.url}: {error.status_code}: {error.response.text}{hint}")
    except OpenAIError as error:
        sys.exit(f"{args.url}: {error}")
