"""What breaks a run, a build or a file, and the stated outcome; the long half is marked
`faults`.
"""
