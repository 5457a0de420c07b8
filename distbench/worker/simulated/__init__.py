"""One rank's real step on a device that is not there: every operator, collective, stream and allocation recorded."""
