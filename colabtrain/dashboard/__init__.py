"""What a person sees. Reads the diary, talks to a Run through a few methods, may be thrown away and rebuilt."""
