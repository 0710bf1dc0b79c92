"""The command `quire`: one module a subcommand, each with configure(parser) and run(arguments)."""
