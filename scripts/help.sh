# Sourced by the other scripts: with --help as first argument they print the comment at their beginning, and end.
case "${1:-}" in
  -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
