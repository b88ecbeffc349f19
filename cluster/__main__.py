"""`python -m expert_pool.cluster`: the command line where no script of it is on the PATH."""

from .cli.commands import main

main(prog_name="expert-pool")
