# frozen_string_literal: true

require 'net/smtp'

module Example
  # Sends letters (one at a time).
  class Mailer
    DEFAULTS = {
      host: 'localhost',
      port: 25,
    }.freeze

    attr_reader :sent

    def initialize(options = {})
      @options = DEFAULTS.merge(options)
      @sent = []
    end

    def deliver(letter, to:)
      raise ArgumentError, 'no recipient :(' if to.nil? || to.empty?

      to.each do |address|
        next unless address =~ /\A[^@\s]+@[^@\s]+\z/

        @sent << [letter, address]
      end
      @sent.size
    rescue Net::SMTPFatalError => e
      warn "refused (#{e.message})"
      0
    ensure
      log(letter)
    end

    def summary
      return 'nothing' if sent.empty?

      sent
        .group_by { |_, address| address.split('@').last }
        .map { |domain, letters| "#{domain}: #{letters.size}" }
        .join(', ')
    end

    private

    def log(letter)
      text = <<~TEXT
        Letter: one
        1) written
        2) sent
      TEXT
      if @options[:verbose]
        puts text
      elsif @options[:log]
        File.write(@options[:log], text)
      else
        text
      end
    end
  end
end
