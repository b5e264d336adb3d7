"""The `attn-backends` command: what it does, prints, and says when something goes wrong."""
