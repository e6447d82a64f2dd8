// SPDX-License-Identifier: Apache-2.0

package run

import (
	"errors"
	"strings"
	"testing"
	"time"

	"instar/dispatch"
)

func TestParseListener(t *testing.T) {
	for text, want := range map[string]Listener{
		"web=tcp:127.0.0.1:80":         {Name: "web", Network: "tcp", Address: "127.0.0.1:80"},
		"web=tcp6:[::1]:80":            {Name: "web", Network: "tcp6", Address: "[::1]:80"},
		"a.b-c=tcp::80":                {Name: "a.b-c", Network: "tcp", Address: ":80"},
		"s=unix:/run/x=y:z":            {Name: "s", Network: "unix", Address: "/run/x=y:z"},
		"s=unix:@x":                    {Name: "s", Network: "unix", Address: "@x"},
		"d=udp::53,steering=stateless": {Name: "d", Network: "udp", Address: ":53", Steering: dispatch.SteeringStateless},
		"e=udp4:127.0.0.1:7,steering=flow,workers=4,rcvbuf=4194304,flow-timeout=30s": {Name: "e", Network: "udp4", Address: "127.0.0.1:7",
			Steering: dispatch.SteeringFlow, Workers: 4, ReceiveBuffer: 4 << 20, FlowTimeout: 30 * time.Second},
	} {
		if got, err := ParseListener(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{
		"":                                   "write NAME=tcp:IP:PORT",
		"tcp:127.0.0.1:80":                   "write NAME=tcp:IP:PORT",
		"=tcp::80":                           "printable ASCII",
		"a:b=tcp::80":                        "printable ASCII",
		"a=sctp::80":                         `unknown network "sctp"`,
		"a=tcp:80":                           "missing port",
		"a=unix:":                            "needs a path",
		"a=udp::53":                          "write steering=stateless",
		"a=udp::53,workers=2":                "write steering=stateless",
		"a=udp::53,steering=quic":            "a server that uses package dispatch",
		"a=udp::53,steering=x":               "steering",
		"a=udp::53,steering=flow,x=1":        `unknown "x"`,
		"a=udp::53,steering=flow,workers=-1": "must not be negative",
		"a=tcp::53,workers=1":                "for UDP alone",
	} {
		if got, err := ParseListener(text); !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want %q", text, got, err, want)
		}
	}
}
