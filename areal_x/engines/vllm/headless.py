"""Runs the part of a vLLM server that computes and serves nothing, on a host other than the first.

    python -m areal_x.engines.vllm.headless --headless --nnodes 2 --node-rank 1 …     # as `vllm serve`

`vllm serve` itself looks for a distribution named vllm, which the build for CPUs is not.
"""

from __future__ import annotations


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
