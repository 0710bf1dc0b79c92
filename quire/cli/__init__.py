"""The command `quire`: one module per subcommand, each with configure(parser) and run(arguments)."""
