"""What the rows of a store say of episodes; it stands below the modules beside this folder."""
