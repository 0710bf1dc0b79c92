"""Pictures that requests contain: fetched under a policy, decoded in processes of their own."""
