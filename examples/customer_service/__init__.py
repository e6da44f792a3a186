"""Customer service in the manner of τ²-bench: a policy, a database, tools that change it, and a
simulated customer."""
