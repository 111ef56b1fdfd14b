"""What every command needs besides its flow: options made from the flow, and a Prefect server."""
