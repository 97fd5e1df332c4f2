#!/bin/sh
{{ command | comment }}
# {{ about.name }} {{ about.version }}; flags from:
{% for source in about.sources.values() %}
#   {{ source }}
{% endfor %}
{% for note in notes %}
{{ ("Note: " ~ note) | comment }}
{% endfor %}
# HEAD: address of an instance's first host. HOST: its number among the instance's hosts, from 0.
# ADDRESS: this host's own address, on which the engine listens; loopback if it is not given.
{% if asks %}
# API_KEY: the key that clients must show.
{% else %}
# This engine asks nobody for a key here: give an ADDRESS that only the cluster's own hosts and your gateway reach.
{% endif %}
set -eu
HEAD="${HEAD:-127.0.0.1}"
ADDRESS="${ADDRESS:-127.0.0.1}"
case "${1:-} ${2:-0}" in
{% for one in launches %}
# {{ one.role }}: {{ one.instances }} instance{{ "s" if one.instances > 1 }} of {{ one.devices }} devices on {{ one.hosts }} host{{ "s" if one.hosts > 1 }} each
{% for line in one.commands() %}
'{{ one.word if launches | length > 1 else "serve" }} {{ loop.index0 }}')
{% if one.config %}
cat > {{ one.file }} <<'EOF'
{{ one.config | indented }}
EOF
{% endif %}
{% if asks %}
: "${API_KEY:?give the key that clients must show, for instance what openssl rand -hex 32 prints}"
{% if "key" in about %}
export {{ about.key }}="$API_KEY"
{% endif %}
{% endif %}
exec {{ line }}
;;
{% endfor %}
{% endfor %}
{% if front %}
'front 0')
{{ front }}
;;
{% endif %}
*)
echo 'usage: sh FILE {{ usage }}' >&2
exit 2
;;
esac
