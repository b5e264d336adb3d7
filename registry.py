"""The registry, from a checkout: the same objects as `attn_backends.registry`. Run it to print the support table.

It is not packaged: a top-level `registry` in site-packages would collide with a distribution of that name.
"""

from attn_backends.registry import *  # noqa: F403 (a façade: the other module's __all__ says what it has)

if __name__ == "__main__":
    import typer

    from attn_backends.cli.app import support_table

    typer.run(support_table)
