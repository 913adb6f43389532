#!/usr/bin/env bash
# with_server.sh SERVER COMMAND...: starts a server that prints its URL, runs the command with TD_URL set, stops the server.
set -eu
server=$1
shift
coproc SERVER { exec "$server"; }
# A coprocess that ends takes its variables with it: keep what is needed.
pid=$SERVER_PID
exec {to_server}>&"${SERVER[1]}"
read -r TD_URL <&"${SERVER[0]}"
export TD_URL
status=0
"$@" || status=$?
exec {to_server}>&-
eval "exec ${SERVER[1]}>&-" # the end of its standard input ends it
wait "$pid" || status=$?
exit "$status"
