print("this agent is traced nowhere else")
