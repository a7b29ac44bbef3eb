print("this agent is built nowhere else")
