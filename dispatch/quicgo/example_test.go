// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"context"
	"crypto/tls"
	"errors"
	"log"
	"time"

	"github.com/quic-go/quic-go"

	"instar/dispatch"
	"instar/dispatch/quicgo"
)

func serve(listener *quic.EarlyListener) {}

// A QUIC server: everything runs before the generation becomes active.
func ExampleTransports() {
	group, err := dispatch.Open(dispatch.Options{Address: "192.0.2.1:443"})
	if err != nil {
		log.Fatal(err)
	}
	gen, err := group.Join(4)
	if err != nil {
		log.Fatal(err)
	}
	transports, err := quicgo.Transports(gen)
	if err != nil {
		log.Fatal(err)
	}
	tlsConfig := quicgo.ServerTLS(gen, &tls.Config{NextProtos: []string{"h3"}}) // and a certificate
	quicConfig := quicgo.ServerConfig(gen, &quic.Config{Allow0RTT: true})
	for _, transport := range transports {
		listener, err := transport.ListenEarly(tlsConfig, quicConfig)
		if err != nil {
			log.Fatal(err)
		}
		go serve(listener)
	}
	if err := gen.Activate(); err != nil {
		log.Fatal(err)
	}

	for {
		<-gen.Superseded()
		idle := make(chan struct{}) // to be closed when the last connection ended
		_, err := gen.Drain(context.Background(), dispatch.DrainOptions{Done: idle, Deadline: time.Minute})
		if errors.Is(err, dispatch.ErrReinstated) {
			continue // the successor died or was rolled back: serve on
		}
		if err != nil {
			log.Print(err)
		}
		break
	}
	for _, transport := range transports {
		_ = transport.Close()
	}
	_ = gen.Close()
	_ = group.Close()
}
