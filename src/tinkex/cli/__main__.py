"""`python -m tinkex.cli`, which is `tinkex`."""

from tinkex.cli import main

main(prog_name="tinkex")
