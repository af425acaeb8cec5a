"""What the caller gets back: a module of the same class whose training forward is planned."""
