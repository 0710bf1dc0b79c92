"""The worker service: owns a device, executes the steps that its scheduler plans."""
