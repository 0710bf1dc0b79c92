"""What has been learned of this worker: how long steps and prompts take, how long answers become."""
